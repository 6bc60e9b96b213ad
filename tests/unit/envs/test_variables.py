"""What an environment worker finds in its environment: no secret that it was not promised."""

from pathlib import Path

import pytest

from prime_rl.envs.protocol import API_KEY_VAR, TOKEN_VAR
from prime_rl.envs.variables import check_promised, passed_on, worker_variables
from prime_rl.errors import UserError
from prime_rl.redact import HIDDEN, is_secret, redacted

SECRETS = [
    "OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "GITHUB_TOKEN", "DB_PASSWORD", "PGPASSWORD",
    "GOOGLE_APPLICATION_CREDENTIALS", "SSH_AUTH_SOCK", "VLLM_API_KEY", "openai_apikey", "MYSQL_PWD", "SERVICE_SECRETS", "API_KEYS",
]  # fmt: skip
PLAIN = [
    "PATH", "HOME", "PWD", "OLDPWD", "PYTHONPATH", "LD_LIBRARY_PATH", "TOKENIZERS_PARALLELISM", "VLLM_MAX_NUM_BATCHED_TOKENS", "KEYBOARD",
    "HF_HOME", "CUDA_VISIBLE_DEVICES", "XDG_RUNTIME_DIR", "LANG", "PRIMERL_FAULTS", "MONKEY", "AUTHOR",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_withheld(name: str) -> None:
    """Contract: a variable whose name looks like a secret's is not passed on, and its name is reported."""
    assert passed_on({name: "x", "PATH": "/bin"}, []) == ({"PATH": "/bin"}, [name])


@pytest.mark.parametrize("name", PLAIN)
def test_the_rest_is_passed_on(name: str) -> None:
    """Contract: what programs need to run is passed on."""
    assert passed_on({name: "x"}, []) == ({name: "x"}, [])


def test_a_promised_secret_is_passed_on() -> None:
    """Contract: `secrets` names what an environment gets, and nothing beside it."""
    assert passed_on({"OPENAI_API_KEY": "x", "HF_TOKEN": "y"}, ["OPENAI_API_KEY"]) == (
        {"OPENAI_API_KEY": "x"},
        ["HF_TOKEN"],
    )


def test_urls_with_passwords_are_secrets() -> None:
    """Contract: a password inside a URL is one, except a proxy's, without which nothing is reached."""
    assert is_secret("DATABASE_URL", "postgres://user:pass@host/db")
    assert not is_secret("HTTPS_PROXY", "http://user:pass@proxy:3128")
    assert not is_secret("HOMEPAGE", "https://example.org:443/a@b")


def test_a_missing_promise_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a secret that is named but not set ends the start, not an episode hours later."""
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    with pytest.raises(UserError, match=r"'math' is to get the variable JUDGE_API_KEY .* not set"):
        check_promised("math", ["JUDGE_API_KEY"])


def test_what_a_worker_gets_from_us() -> None:
    """Contract: the engine's key under the worker's own name, its token, no proxy towards our engine, its path."""
    got = worker_variables({"A": "1"}, token="t", base_urls=["http://engine:8000/v1"], api_key="k", path=Path("/p"))  # fmt: skip
    assert (got["A"], got[TOKEN_VAR], got[API_KEY_VAR], got["PYTHONPATH"]) == ("1", "t", "k", "/p")
    assert "engine" in got["NO_PROXY"].split(",")
    assert API_KEY_VAR not in worker_variables({}, token="t", base_urls=["http://h"], api_key=None, path=None)


def test_redacted() -> None:
    """Contract: what others get to see has no values under the names of secrets, at any depth; the rest is unchanged."""
    table = {
        "client": {"api_key_var": "VLLM_API_KEY"},
        "args": {"judge_api_key": "sk-1", "max_tokens": 5},
        "l": [{"password": "p"}],
    }
    assert redacted(table) == {
        "client": {"api_key_var": "VLLM_API_KEY"},
        "args": {"judge_api_key": HIDDEN, "max_tokens": 5},
        "l": [{"password": HIDDEN}],
    }
