"""Stand-ins for vLLM: an interpreter that has the fake of it, and a server that speaks its API."""

import json
import math
import random
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import torch

from tests.helpers.models import VOCABULARY, llama

FAKE = Path(__file__).parent / "vllm_fake"
INTERPRETER = """#!{python}
import runpy, sys
options, script = sys.argv[1:]
assert options == "-I"
sys.path.insert(0, {folder!r})
runpy.run_path(script, run_name="__main__")
"""


def interpreter(folder: Path) -> str:
    """An executable that runs a script as a python would in whose environment vLLM is."""
    path = folder / "python"
    path.write_text(INTERPRETER.format(python=sys.executable, folder=str(FAKE)))
    path.chmod(0o755)
    return str(path)


def uniform_policy():
    """A model for which all tokens are equally likely, as they are for the stand-ins."""
    policy = llama(tied=False)
    torch.nn.init.zeros_(policy.lm_head.weight)
    return policy


class Handler(BaseHTTPRequestHandler):
    """/v1/models and /v1/completions; `server.asked` keeps the bodies, `server.change` alters."""

    def do_GET(self):
        self._answer({"data": [{"id": "policy"}, {"id": "another"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        draw, ids = random.Random(f"{asked['seed']} {asked['prompt']}"), []
        while len(ids) < asked["max_tokens"] and not set(ids) & set(asked["stop_token_ids"]):
            ids.append(draw.randrange(VOCABULARY))
        choice = {
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-math.log(VOCABULARY)] * len(ids)},
            "finish_reason": "stop" if ids[-1] in asked["stop_token_ids"] else "length",
        }
        self._answer({"choices": [choice | self.server.change]})

    def _answer(self, values: dict) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(json.dumps(values).encode())

    def log_message(self, *_):
        pass


@contextmanager
def server(status: int = 200, **change):
    """A server on a free port of this machine."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.asked, made.status, made.change = [], status, change
    made.address = f"http://127.0.0.1:{made.server_port}"
    Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()
