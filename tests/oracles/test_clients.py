"""A real server with a key, driven by other people's clients: what they get is what transformers computes for the same model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import InferenceServer, launch_server
from support.oracles import Oracle
from support.serving import TOLERANCE

pytestmark = pytest.mark.slow

KEY = "a-key-of-these-tests"
PROMPT = "The quick brown fox"
MESSAGES: Any = [{"role": "user", "content": "Reverse: lazy dog"}]
TOKENS = 12


class Reference:
    """The model in transformers, float32, on whole sequences."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """[T, V]: of the token after each."""
        with torch.no_grad():
            return self._model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def greedy(self, ids: list[int], tokens: int) -> tuple[list[int], list[float]]:
        """The most probable continuation, up to the end of the turn, and its log-probabilities."""
        sampled, logprobs = list[int](), list[float]()
        while len(sampled) < tokens and self.tokenizer.eos_token_id not in sampled:
            best = self.logprobs(ids + sampled)[-1].max(-1)
            sampled.append(int(best.indices))
            logprobs.append(float(best.values))
        return sampled, logprobs

    def text(self, sampled: list[int]) -> str:
        return str(self.tokenizer.decode(sampled, skip_special_tokens=True))

    def chat(self) -> list[int]:
        text = self.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    settings = {"server": {"host": "127.0.0.1"}}
    with launch_server(
        tmp_path_factory.mktemp("keyed"), tiny_model, settings, environment={"VLLM_API_KEY": KEY}
    ) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def client(server: InferenceServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key=KEY, timeout=120) as connection:
        yield connection


@pytest.fixture(scope="module")
def model(server: InferenceServer) -> str:
    return str(server.model)


def test_openai_completion(client: openai.OpenAI, model: str, reference: Reference) -> None:
    """Contract: text, finish reason, usage, and the log-probabilities of prompt and reply."""
    prompt = reference.ids(PROMPT)
    sampled, logprobs = reference.greedy(prompt, TOKENS)
    response = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=TOKENS, temperature=0, logprobs=1, echo=True
    )
    (choice,) = response.choices
    assert choice.text == PROMPT + reference.text(sampled)
    assert choice.finish_reason == ("length" if len(sampled) == TOKENS else "stop")
    assert response.usage is not None
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (len(prompt), len(sampled))
    of_prompt = reference.logprobs(prompt)[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [
        None,
        *(pytest.approx(one, abs=TOLERANCE) for one in of_prompt + logprobs),
    ]


def test_openai_chat(client: openai.OpenAI, model: str, reference: Reference) -> None:
    """Contract: the chat template is applied; the two most probable tokens come with their log-probabilities."""
    prompt = reference.chat()
    sampled, logprobs = reference.greedy(prompt, TOKENS)
    response = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=TOKENS, temperature=0, logprobs=True, top_logprobs=2
    )
    (choice,) = response.choices
    assert (choice.message.role, choice.message.content) == ("assistant", reference.text(sampled))
    assert response.usage is not None
    assert response.usage.prompt_tokens == len(prompt)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(logprobs, abs=TOLERANCE)
    second = reference.logprobs(prompt)[-1].topk(2).values.tolist()
    assert [one.logprob for one in choice.logprobs.content[0].top_logprobs] == pytest.approx(second, abs=TOLERANCE)


def test_openai_wrong_key(server: InferenceServer, model: str) -> None:
    with openai.OpenAI(base_url=server.base_url, api_key="wrong", max_retries=0, timeout=60) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(model=model, messages=MESSAGES, max_tokens=1)


# -- lm-eval -----------------------------------------------------------------------------------------------------------------

QUESTIONS = [
    {"question": "lazy dog", "choices": ["god yzal", "dog lazy", "ab"], "answer": 0},
    {"question": "abc", "choices": ["abc", "cba"], "answer": 1},
    {"question": "quick fox", "choices": ["x", "xof kciuq", "quick fox"], "answer": 1},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: {output_type}
doc_to_text: "Reverse: {{{{question}}}}\\nAnswer:"
{rest}
"""
CHOICES = """doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""
TEXT = """doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs:
  until: ["e"]
  max_gen_toks: 12
  do_sample: false
  temperature: 0
metric_list:
  - metric: exact_match
""".replace("{{{{", "{{").replace("}}}}", "}}")


def test_lm_eval(server: InferenceServer, lm_eval: Oracle, reference: Reference, tmp_path: Path) -> None:
    """Contract: loglikelihoods, whether a choice is the greedy one, and generated texts are those of transformers."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for name, output_type, rest in (("choices", "multiple_choice", CHOICES), ("texts", "generate_until", TEXT)):
        task = TASK.format(name=f"local_{name}", file=rows, output_type=output_type, rest=rest)
        (tmp_path / f"{name}.yaml").write_text(task)
    arguments = {
        "model": server.model, "base_url": f"{server.base_url}/completions", "tokenizer": server.model,
        "tokenizer_backend": "huggingface", "num_concurrent": 1, "max_retries": 1, "max_length": 512,
    }  # fmt: skip
    lm_eval.run(
        [
            "-m", "lm_eval", "run", "--model", "local-completions",
            "--model_args", ",".join(f"{key}={value}" for key, value in arguments.items()),
            "--tasks", "local_choices,local_texts", "--include_path", str(tmp_path),
            "--output_path", str(tmp_path / "results"), "--log_samples",
        ],
        tmp_path,
        {"OPENAI_API_KEY": KEY, "HF_HOME": str(tmp_path / "hf")},
    )  # fmt: skip

    def samples(task: str) -> list[dict[str, Any]]:
        (file,) = (tmp_path / "results").rglob(f"samples_{task}_*.jsonl")
        rows_of_task = [json.loads(line) for line in file.read_text().splitlines()]
        return sorted(rows_of_task, key=lambda sample: sample["doc_id"])

    for row, sample in zip(QUESTIONS, samples("local_choices"), strict=True):
        prompt = reference.ids(f"Reverse: {row['question']}\nAnswer:")
        assert len(sample["filtered_resps"]) == len(row["choices"])  # type: ignore[arg-type]
        for choice, (likelihood, is_greedy) in zip(row["choices"], sample["filtered_resps"], strict=True):  # type: ignore[call-overload]
            answer = reference.ids(f" {choice}")
            logprobs = reference.logprobs(prompt + answer)[len(prompt) - 1 : -1]
            expected = logprobs.gather(-1, torch.tensor(answer)[:, None]).sum().item()
            assert float(likelihood) == pytest.approx(expected, abs=TOLERANCE * len(answer))
            assert str(is_greedy) == str(logprobs.argmax(-1).tolist() == answer)
    for row, sample in zip(QUESTIONS, samples("local_texts"), strict=True):
        sampled, _ = reference.greedy(reference.ids(f"Reverse: {row['question']}\nAnswer:"), 12)
        assert sample["filtered_resps"] == [reference.text(sampled).split("e")[0]]
