"""vLLM's server in front of an engine of its own process, as an operator starts it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch

from firesteel.integrations.transformers import load_model
from tests.integrations.vllm.engine import ENVIRONMENT, EXTENSION

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

LITTLE = Path(__file__).parents[3] / "examples" / "little_moe" / "int4-g128"
PROMPT = [5, 17, 300, 41, 8]
MAX_TOKENS = 16
SECONDS_TO_START = 300


def _ask(url, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = Request(url + path, data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as answer:
        text = answer.read()
    return json.loads(text) if text else None


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server of the example's checkpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(LITTLE), "--served-model-name", "little"]
    command += ["--quantization", "firesteel", "--worker-extension-cls", EXTENSION]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256"]
    if torch.cuda.is_available():
        command += ["--attention-backend", "TRITON_ATTN", "--gpu-memory-utilization", "0.1"]
        command += ["--kv-cache-memory-bytes", "1000000000"]
    else:
        command += ["--dtype", "float32", "--enforce-eager"]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
    # The engine in a process of its own, as by default.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + SECONDS_TO_START
        while True:
            try:
                _ask(url, "/health")
                break
            except (URLError, OSError):
                # What ended the engine's process stands far above the server's own last words.
                assert process.poll() is None, log.read_text()[-20000:]
                assert time.monotonic() < end, log.read_text()[-20000:]
                time.sleep(1)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _complete(url):
    body = {"model": "little", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    answer = _ask(url, "/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
    return answer["choices"][0]["token_ids"]


def test_it_serves_the_tokens_of_load_model_and_reports(server):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "auto" if device == "cuda" else torch.float32
    model = load_model(LITTLE, device=device, dtype=dtype)
    ids = torch.tensor([PROMPT], device=model.device)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(ids, max_new_tokens=MAX_TOKENS, **options)[0, len(PROMPT) :].tolist()
    (before,) = _ask(server, "/collective_rpc", {"method": "firesteel_report"})["results"]
    assert _complete(server) == wanted
    (after,) = _ask(server, "/collective_rpc", {"method": "firesteel_report"})["results"]
    assert before["layers"] == after["layers"] == model.config.num_hidden_layers
    if device == "cpu":
        assert list(after["kernels"]["refused"]) == ["device: cpu, kernels need a CUDA device"]
        return
    assert after["kernels"]["refused"] == {}
    (plan,), (ready,) = after["kernels"]["plans"], before["kernels"]["plans"]
    assert plan["prewarmed"] == ready["prewarmed"]
    # Those of warm-up and capture: what is served after that replays graphs.
    assert plan["launches"] == ready["launches"] > 0
    assert plan["misses"] == plan["launched_unplanned"] == []
