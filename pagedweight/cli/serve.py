"""`pagedweight serve`: an OpenAI-compatible endpoint over a quantized model."""

from __future__ import annotations

import enum
import importlib.util
import ipaddress
import os
import secrets
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedweight.cli.common import device_option, fail, require_extras, size_option

if TYPE_CHECKING:
    from fastapi import FastAPI
    from transformers import PreTrainedModel

    from pagedweight.cli.bars import Bars
    from pagedweight.serving.engine import Engine

GRACE_SECONDS = 15  # for running requests when the server is stopped; a second Ctrl-C ends it at once
# Of ours that vLLM's server takes too; its other options come after --.
VLLM_TAKES = ("checkpoint", "vllm_options", "host", "port", "engine", "name")
TokenFile = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, readable=True)]


class EngineName(enum.StrEnum):
    AUTO = "auto"
    TRANSFORMERS = "transformers"
    VLLM = "vllm"


class Batching(enum.StrEnum):
    CONTINUOUS = "continuous"
    OFF = "off"


def serve(
    context: typer.Context,
    checkpoint: Annotated[Path, typer.Argument(help="Folder that quantize or save wrote.", file_okay=False)],
    vllm_options: Annotated[list[str] | None, typer.Argument(help="After --: options of vLLM's own server.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Bytes for expert weights and KV cache together; none keeps full width.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; others than 127.0.0.1 can be reached.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    engine: Annotated[
        EngineName,
        typer.Option(help="auto: vLLM where it and a GPU are and no option asks for more, else transformers."),
    ] = EngineName.AUTO,
    batching: Annotated[
        Batching, typer.Option(help="off: one request after the other, with stop, seed and penalties.")
    ] = Batching.CONTINUOUS,
    name: Annotated[str | None, typer.Option(help="Model name for clients; the folder's if left out.")] = None,
    device: Annotated[str | None, typer.Option(help="Where the model runs; the GPU if there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens that a request may ask for.")] = 1024,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests answered or waiting at once.")] = 256,
    max_body: Annotated[str, typer.Option(help="Bytes of a request's body.")] = "1MiB",
    batch_tokens: Annotated[int, typer.Option(min=16, help="Tokens of one forward of continuous batching.")] = 512,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one request, waiting included.")] = 600.0,
    api_key_file: TokenFile = None,
    admin_token_file: TokenFile = None,
    trace: Annotated[Path | None, typer.Option(help="Write planner steps here.", dir_okay=False)] = None,
) -> None:
    """Serve a quantized model: /v1/completions, /v1/chat/completions, /metrics, /health, and /admin with a token.

    Without --admin-token-file a token is made up and printed. Stop with Ctrl-C.
    """
    own = _options_beyond_vllm(context)
    if engine is EngineName.VLLM and own:
        raise fail(f"{', '.join(own)}: not with --engine vllm; give options of vLLM's own server after --")
    if engine is EngineName.VLLM or (engine is EngineName.AUTO and not own and _vllm_serves()):
        _become_vllm(checkpoint, host, port, name or checkpoint.resolve().name, vllm_options or [])
    if vllm_options:
        raise fail(
            f"{' '.join(_without_secrets(vllm_options))}: options after -- are for vLLM's server; add --engine vllm"
        )
    require_extras("serve")
    api_key, admin_token = _token(api_key_file, "--api-key-file"), _token(admin_token_file, "--admin-token-file")
    budget_bytes = None if budget is None else size_option("--budget", budget)
    body_bytes = size_option("--max-body", max_body)
    with _bound(host, port) as at:
        typer.echo(f"loading {checkpoint}", err=True)  # before what takes seconds to import
        from pagedweight.serving.app import build_app
        from pagedweight.serving.limits import Limits

        limits = Limits(body_bytes, max_requests, max_tokens, timeout)
        loaded = _load(checkpoint, budget_bytes, device, dtype, trace, name, batching, batch_tokens)
        if api_key is None and not _loopback(host):
            typer.echo(f"warning: whoever reaches {host} can use the model; give --api-key-file", err=True)
        app = build_app(loaded, limits, admin_token=admin_token or _made_up_token(), api_key=api_key)
        _listen(app, loaded.name, at, 4 * max_requests)


def _bound(host: str, port: int) -> socket.socket:
    """A socket of the server's address, bound before the model loads; leaves with code 2 where it cannot be."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise fail(f"{host} port {port}: {error.strerror}; give another --host or --port") from error
    return bound


def _listen(app: FastAPI, name: str, at: socket.socket, connections: int) -> None:
    """Until Ctrl-C or SIGTERM. connections: at once, those of idle clients included."""
    import uvicorn

    from pagedweight.serving.connections import Timely

    manners = {"log_level": "warning", "timeout_keep_alive": 30, "timeout_graceful_shutdown": GRACE_SECONDS}
    settings = uvicorn.Config(app, http=Timely, ws="none", limit_concurrency=connections, **manners)
    host, port = at.getsockname()[:2]
    try:
        at.listen()  # another server that was bound to the same port may have come first
    except OSError as error:
        raise fail(f"{host} port {port}: {error.strerror}; give another --host or --port") from error
    typer.echo(f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}", err=True)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(settings).run(sockets=[at])


def _load(
    checkpoint: Path,
    budget_bytes: int | None,
    device: str | None,
    dtype: str,
    trace: Path | None,
    name: str | None,
    batching: Batching,
    batch_tokens: int,
) -> Engine:
    """The model with its tokenizer, ready; leaves with code 2 when the folder, the budget or a name will not do."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    import pagedweight
    from pagedweight.cli.bars import bars
    from pagedweight.cli.loading import load_checked
    from pagedweight.serving.engine import Engine

    if dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise fail(f"--dtype {dtype}: use auto, bfloat16, float16 or float32")
    logging.set_verbosity_error()  # a line for each request otherwise
    trace_path = None if trace is None else str(trace)
    device = device_option(device)
    try:
        config = pagedweight.RuntimeConfig(budget_bytes=budget_bytes, trace_path=trace_path)
        with bars() as progress:
            model = load_checked(checkpoint, progress, config=config, device_map=device, dtype=dtype)
            _compile(model, progress)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise fail(" ".join(str(error).split())) from error
    batched = batching is Batching.CONTINUOUS
    called = name or checkpoint.resolve().name
    return Engine(model, tokenizer, called, batched=batched, batch_tokens=batch_tokens)


def _compile(model: PreTrainedModel, progress: Bars) -> None:
    """Now, or the first request of every batch size would wait for its kernels."""
    import pagedweight

    def shown(step: str, done: int, kernels: int) -> None:
        if done == 0 and kernels:
            progress.say(f"compiling {kernels} kernels: about a minute, or seconds where Triton's cache has them")
        progress(step, done, kernels)

    pagedweight.compile_kernels(model, progress=shown)


def _vllm_serves() -> bool:
    if importlib.util.find_spec("vllm") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _options_beyond_vllm(context: typer.Context) -> list[str]:
    """The options given that vLLM's server would not hear of."""
    ours = [parameter for parameter in context.command.params if parameter.name not in VLLM_TAKES]
    given = [one for one in ours if context.get_parameter_source(one.name).name == "COMMANDLINE"]
    return [one.opts[0] for one in given]


def _become_vllm(checkpoint: Path, host: str, port: int, name: str, options: list[str]) -> None:
    """Replace this process by vLLM's own server, in which the plug-in serves the folder and adds to its /metrics."""
    require_extras("vllm")
    # What `vllm serve` starts; that command itself fails where vLLM comes from a distribution of another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--host", host, "--port", str(port), "--served-model-name", name, *options]
    typer.echo(f"starting {' '.join(_without_secrets(command[2:]))}", err=True)
    os.execv(sys.executable, command)


def _without_secrets(words: list[str]) -> list[str]:
    """A command line as it may be shown: what follows an option named after a key or a token is left out."""
    shown, secret = [], False
    for word in words:
        option, equals, _ = word.partition("=")
        named = option.startswith("-") and any(name in option for name in ("key", "token"))
        shown.append("..." if secret and not word.startswith("-") else f"{option}=..." if named and equals else word)
        # An option may take several words.
        secret = (named and not equals) or (secret and not word.startswith("-"))
    return shown


def _token(path: Path | None, option: str) -> str | None:
    if path is None:
        return None
    token = path.read_bytes().strip()
    if len(token) < 16 or not all(0x21 <= byte <= 0x7E for byte in token):
        raise fail(f"{option} {path}: {len(token)} bytes are no token; give at least 16 characters of ASCII, no blanks")
    return token.decode("ascii")


def _made_up_token() -> str:
    token = secrets.token_urlsafe(24)
    typer.echo(f"admin token: {token}", err=True)
    return token


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
