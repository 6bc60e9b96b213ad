"""How many workers an environment has, and which of our variables they get."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.config.shared import EnvConfig
from prime_rl.envs import pool
from prime_rl.envs.pool import EnvPool, worker_range, workers_wanted
from prime_rl.envs.protocol import API_KEY_VAR
from prime_rl.errors import UserError
from prime_rl.redact import is_secret, passed_on

counts = st.integers(0, 200)
sizes = st.integers(1, 64)


@given(sizes, st.booleans(), st.floats(0, 1), counts, sizes, st.integers(1, 4), st.integers(0, 64), st.integers(0, 32))
def test_the_number_that_a_load_calls_for(workers, starting, use, episodes, slots, least, more, free):
    """Within bounds; as many as the episodes fill; more only where the ready are busy, on idle cores, all ready."""
    most = least + more
    wanted = workers_wanted(
        workers=workers, starting=int(starting), use=use * workers, episodes=episodes, slots=slots, min_workers=least,
        max_workers=most, free=free
    )  # fmt: skip
    assert least <= wanted <= most
    assert wanted == most or wanted * slots >= episodes
    if wanted > max(workers, math.ceil(episodes / slots), least):
        assert use > 0.6
        assert not starting
        assert wanted <= min(2 * workers, workers + free)
    if wanted < min(workers, most):
        assert not starting
        assert use * workers <= 0.6 * wanted + 1e-9


@pytest.mark.parametrize(("cores", "environments", "least"), [(2, 1, 1), (8, 1, 2), (32, 1, 4), (32, 2, 2), (16, 9, 1)])
def test_settings(monkeypatch, cores, environments, least):
    """A number is kept; `auto` begins with one, or more if cores allow it, and never exceeds its maximum."""
    monkeypatch.setattr(pool, "cores", lambda: cores)
    assert worker_range(3, None) == (3, 3)
    assert worker_range("auto", None, environments) == (least, cores)
    assert worker_range("auto", 1, environments) == (1, 1)


SECRETS = [
    "OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "GITHUB_TOKEN",
    "DB_PASSWORD", "PGPASSWORD", "GOOGLE_APPLICATION_CREDENTIALS", "SSH_AUTH_SOCK", "VLLM_API_KEY", "openai_apikey",
    "MYSQL_PWD", "SERVICE_SECRETS", "API_KEYS",
]  # fmt: skip
PLAIN = [
    "PATH", "HOME", "PWD", "OLDPWD", "PYTHONPATH", "LD_LIBRARY_PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD",
    "VLLM_MAX_NUM_BATCHED_TOKENS", "HF_HOME", "CUDA_VISIBLE_DEVICES", "XDG_RUNTIME_DIR", "LANG", "PRIMERL_FAULTS",
    "MONKEY", "AUTHOR",
]  # fmt: skip


def test_secrets_are_withheld():
    """Contract: a variable whose name looks like a secret's, or a URL with a password, is reported and not passed on
    unless `secrets` names it; all others are, a proxy's too, without which nothing is reached."""
    plain = dict.fromkeys(PLAIN, "x")
    assert passed_on({**plain, **dict.fromkeys(SECRETS, "x")}, []) == (plain, sorted(SECRETS))
    keys = {"OPENAI_API_KEY": "x", "HF_TOKEN": "y"}
    assert passed_on(keys, ["OPENAI_API_KEY"]) == ({"OPENAI_API_KEY": "x"}, ["HF_TOKEN"])
    assert is_secret("DATABASE_URL", "postgres://user:pass@host/db")
    assert not is_secret("HTTPS_PROXY", "http://user:pass@proxy:3128")
    assert not is_secret("HOMEPAGE", "https://example.org:443/a@b")


def test_a_missing_secret_is_an_error(monkeypatch, tmp_path):
    """Contract: a secret that is named but not set ends the start, not an episode hours later."""
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    config = EnvConfig(id="math", secrets=["JUDGE_API_KEY"])
    with pytest.raises(UserError, match=r"'math' is to get the variable JUDGE_API_KEY .* not set"):
        EnvPool([config], model="m", base_url="", api_key=None, output_dir=tmp_path)


def test_what_a_worker_gets_from_us(monkeypatch, tmp_path):
    """Contract: the engine's key under the worker's own name, no proxy towards tool servers."""
    monkeypatch.setenv("A", "1")
    monkeypatch.setenv("NO_PROXY", "intranet")
    for key in ("k", None):
        pool = EnvPool([EnvConfig(id="e")], model="m", base_url="http://engine:8000", api_key=key, output_dir=tmp_path)
        variables = pool.sets["e"].variables
        assert (variables["A"], variables.get(API_KEY_VAR)) == ("1", key)
        assert {"intranet", "127.0.0.1"} <= set(variables["NO_PROXY"].split(","))
