"""`lanternpp serve`: an HTTP server that draws, with OpenAI's Images API and a page."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from lanternpp.api.options import MAX_SECONDS, DrawOptions, drawn_with
from lanternpp.cli import options as opt
from lanternpp.errors import InputError, counted
from lanternpp.serve.config import LOOPBACK, ServerConfig, check_proxies, gather_keys, host_name, require
from lanternpp.util.options import Option
from lanternpp.util.terminal import say


@dataclass(frozen=True)
class ListenOptions:
    """The address of the server, and the requests that it accepts.

    host: Address to listen on; 0.0.0.0: all addresses of this machine.
    drain: Seconds for accepted pictures to finish after SIGTERM.
    api_key: Accept requests with this key; may be given again. Other users of this machine can read the key in the list of
        processes: prefer --api-key-file, or the variable LANTERNPP_API_KEYS.
    allow_host: A name to accept in the Host header besides those of this machine, such as a proxy's; the proxy must pass the
        header on. Pages of other sites are rejected all the same. May be given again.
    forwarded_allow_ips: Proxies whose X-Forwarded-For is trusted: addresses or networks, separated by commas; * for any.
        Default: none.
    """

    heading = "Server"
    host: str = "127.0.0.1"
    port: Annotated[int, Option("0: any free one.", ge=0, le=65535)] = 8000
    drain: Annotated[float, Option(ge=0, le=MAX_SECONDS)] = 60.0
    api_key: Annotated[list[str] | None, Option(metavar="KEY")] = None
    api_key_file: Annotated[Path | None, Option("One key per line.", metavar="FILE")] = None
    no_key: Annotated[bool, Option("Accept requests without a key on any --host.")] = False
    allow_host: Annotated[list[str] | None, Option(metavar="NAME")] = None
    forwarded_allow_ips: Annotated[str | None, Option(metavar="IPS")] = None

    def access(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the API keys and the accepted Host headers, () for any; raise InputError if other machines can connect without a key."""
        is_local, hosts = self.host in LOOPBACK, self.allow_host or ()
        for name in hosts:
            if host_name(f"[{name}]" if ":" in name else name) != name.lower():
                raise InputError(
                    f"--allow-host {name!r} is no name alone; leave out scheme, port, path, brackets and last dot"
                )
        keys = gather_keys(self.api_key or (), self.api_key_file)
        if not is_local and not keys and not self.no_key:
            raise InputError(
                f"--host {self.host} can be reached by others, and there is no API key; give --api-key-file, or --no-key to let "
                "everybody draw"
            )
        return keys, (*LOOPBACK, *hosts) if is_local or hosts else ()


@opt.verb
def serve(
    *,
    listen: ListenOptions = ListenOptions(),
    config: Annotated[ServerConfig, opt.without("method", "overrides", "keys", "hosts")] = ServerConfig(),
    ray: opt.Ray = None,
    replicas: Annotated[int | None, opt.workers("Servers under --ray")] = None,
    options: DrawOptions = DrawOptions(),
) -> None:
    """Draw over HTTP, with OpenAI's Images API at /v1 and a page at /; many pictures share every pass.

    The method and its options are the defaults of requests. SIGTERM lets accepted pictures finish. With --ray, several
    servers share the work.
    """
    if "batch_size" in options.overrides:
        raise InputError(
            "--batch-size would change nothing: the server decides the batch size itself; use --slots"
        )
    opt.check_ray(ray, "--replicas", replicas)
    require()
    proxies = check_proxies(listen.forwarded_allow_ips)
    keys, hosts = listen.access()

    from lanternpp.serve import server

    with server.bind(listen.host, listen.port) as bound:
        opt.check(options)

        from lanternpp.serve import ray_serve
        from lanternpp.serve.app import ServerSpec

        options = opt.for_workers(options)
        config = replace(config, method=options.method, overrides=options.overrides, keys=keys, hosts=hosts)
        spec, out = ServerSpec(options, config), sys.stdout

        def print_ready(method: str, count: int, model: str, effect: str | None) -> None:
            if effect:
                say("int8", effect)
            slots = counted(config.slots, "slot")
            slots = f"{counted(count, 'replica')} of {slots}" if ray else slots
            # While Ray runs, sys.stdout is discarded, as Ray's messages go to it.
            print(f"{server.url(bound)}: {model} with {method}, {slots}", file=out, flush=True)

        if ray is not None:
            on_ready = partial(print_ready, options.method)
            finished = ray_serve.run(ray, replicas, spec, bound, listen.drain, on_ready, proxies)
        else:
            batcher, app = spec.start()
            chosen, settings = batcher.pipe.chosen(options.method), config.settings(batcher.pipe, None, {})
            method = drawn_with(chosen.method, chosen.reason(settings), asdict(replace(settings, fit=False)))
            on_ready = partial(print_ready, method, 1, *ray_serve.describe_model(batcher.pipe))
            finished = server.run(app, batcher, bound, listen.drain, on_ready, proxies)
        if not finished:
            say("serve", "not all pictures were finished")
