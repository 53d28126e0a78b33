"""Make the blocking client from the asyncio one: `qmq/blocking/__init__.py` and
`qmq/blocking/admin.py`, from the classes in MODULES.

    python tools/generate_blocking.py

Each public method of a class becomes a method of the same name, with the same parameters and the
same docstring:

    async def                   runs in the event loop's thread, and the caller waits
    def                         the same, since the asyncio client may only be used in its loop's
                                thread
    an asynchronous generator   an iterator whose items are fetched one by one
    a property                  the value; a part of the client becomes the part's blocking class

What cannot be made so is written by hand in `qmq/blocking/loop_thread.py`.
tests/qmq/client/test_blocking.py compares the committed files with what this writes.
"""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
MADE: Final = "# Made by tools/generate_blocking.py: change the asyncio client, and run that again."


@dataclass(frozen=True, slots=True)
class Source:
    """A class of the asyncio client, and the blocking class that is generated from it."""

    path: str
    name: str
    blocking: str
    base: str
    about: str
    methods: frozenset[str] = frozenset()
    """Only these methods; empty means all public methods."""
    left_out: frozenset[str] = frozenset()
    parents: tuple[tuple[str, str], ...] = ()
    """The module and the name of each class that the class inherits methods from."""


CLIENT: Final = (
    Source(
        "qmq/client/client.py",
        "Client",
        "BlockingClient",
        "BlockingClientBase",
        (
            "Sends and consumes. Make it with `qmq.blocking.connect`; use it with `with`.\n"
            "    Any thread may call.\n    "
        ),
        frozenset(
            {
                "send",
                "send_many",
                "browse",
                "queue_ends",
                "serve_metrics",
                "metrics",
                "delayed",
                "metadata",
                "access",
                "consumer",
            }
            | {"is_paused", "pause", "resume"}
        ),
        parents=(("qmq/client/producing/client.py", "SendingClient"),),
    ),
    Source(
        "qmq/client/consuming/consumer.py",
        "Consumer",
        "BlockingConsumer",
        "BlockingConsumerBase",
        (
            "One consumer of a group. Make it with `BlockingClient.consumer`,\n"
            "    and iterate over it, or `pull`.\n    "
        ),
        frozenset({"close", "held", "is_paused", "join", "limit", "pause", "resume"}),
    ),
)
PARTS: Final = (
    Source(
        "qmq/client/producing/delayed.py",
        "Delayed",
        "BlockingDelayed",
        "BlockingPart",
        "Delayed messages that wait: `BlockingClient.delayed`.",
    ),
    Source(
        "qmq/client/metadata/service.py",
        "MetadataClient",
        "BlockingMetadata",
        "BlockingPart",
        (
            "Administration: subjects, groups, routes and broker groups, as a metaserver sees\n"
            "    them: `BlockingClient.metadata`.\n    "
        ),
        left_out=frozenset(
            {
                "call",
                "use_next_server",
                "locate",
                "routes",
                "watch",
                "sync_member",
                "ask_delayed",
                "close",
            }
        ),
    ),
    Source(
        "qmq/client/metadata/access.py",
        "AccessClient",
        "BlockingAccess",
        "BlockingPart",
        "Who may do what in the cluster: `BlockingClient.access`.",
    ),
)
BLOCKING: Final = {each.name: each.blocking for each in (*CLIENT, *PARTS)}
HEAD: Final = '''"""The client without asyncio, for scripts: the same names, each call waits.

    with qmq.blocking.connect("localhost:20880") as mq:
        mq.send("flight.departed", b"...", key="N14228")
        for message in mq.consumer("flight.departed", group="ops"):
            ...

An event loop runs in its own thread; any thread may call.
"""
'''
TAIL: Final = '''
def connect(
    addresses: str | Sequence[str] | None = None,
    *,
    create_subjects: bool = True,
    interceptors: Iterable[Interceptor] = (),
    name: str | None = None,
    state_dir: StateDir = None,
    tls: Tls | None = None,
    token: Token = None,
    delivery_timeout: timedelta | None = None,
) -> BlockingClient:
    """A client whose calls wait; `qmq.connect` explains the parameters and the errors."""
    thread = LoopThread()
    client = Client(
        addresses or default_server(),
        create_subjects=create_subjects,
        interceptors=interceptors,
        name=name,
        state_dir=state_dir,
        network=network_of(tls, token),
        for_threads=beside,
        timing=timing_with(delivery_timeout),
    )
    thread.start()
    return BlockingClient(client, thread)


def beside(client: Client, loop: asyncio.AbstractEventLoop) -> BlockingClient:
    """A blocking client beside an asyncio client, for the threads of plain handlers. Its `close`
    does nothing.
    """
    return BlockingClient(client, LoopThread(loop))


__all__ = [
    "BlockingAccess",
    "BlockingClient",
    "BlockingConsumer",
    "BlockingDelayed",
    "BlockingMetadata",
    "beside",
    "connect",
]
'''
IMPORTS: Final = """
import asyncio
from collections.abc import Iterable, Sequence
from qmq.blocking.loop_thread import BlockingClientBase, BlockingConsumerBase, LoopThread
from qmq.blocking.admin import BlockingAccess, BlockingDelayed, BlockingMetadata
from qmq.client.client import Client
from qmq.client.connection.connection import timing_with
from qmq.client.interceptors import Interceptor
from qmq.client.consuming.ack_spool import StateDir
from qmq.security.tokens import Token
from qmq.security.contexts import default_server
from qmq.security.tls import Tls
from qmq.rpc.tls_network import network_of
"""
PARTS_HEAD: Final = '''"""The parts of the blocking client: delayed messages that wait,
administration, and access rules.
"""
'''
PARTS_IMPORTS: Final = """
from qmq.blocking.loop_thread import BlockingPart, LoopThread
"""


@dataclass(frozen=True, slots=True)
class MadeModule:
    """A generated file: its classes, its beginning,
    the imports that it needs when it runs, and its end.
    """

    path: Path
    sources: tuple[Source, ...]
    head: str
    imports: str
    tail: str = ""


MODULES: Final = (
    MadeModule(ROOT / "qmq" / "blocking" / "__init__.py", CLIENT, HEAD, IMPORTS, TAIL),
    MadeModule(ROOT / "qmq" / "blocking" / "admin.py", PARTS, PARTS_HEAD, PARTS_IMPORTS),
)


@dataclass(slots=True)
class Imports:
    """The names that annotations of a generated file need.
    They are imported for type checking only.
    """

    needed: str
    """The imports that the file has in any case."""
    types: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """As statements, unsorted."""
        known = {
            each.name
            for node in ast.parse(self.needed).body
            if isinstance(node, ast.ImportFrom)
            for each in node.names
        }
        lines = [f"    {line}" for name, line in self.types.items() if name not in known]
        return "\n".join(["from typing import TYPE_CHECKING", "if TYPE_CHECKING:", *lines]) + "\n"


class Module:
    """A module of the asyncio client: its classes, and where its names come from."""

    def __init__(self, path: str) -> None:
        self.name = path.removesuffix(".py").replace("/", ".")
        self.tree = ast.parse((ROOT / path).read_text())
        self._origins: dict[str, tuple[str, str]] = {}
        self._constants = {
            node.target.id: node.value
            for node in self.tree.body
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                self._origins.update(
                    {each.asname or each.name: (node.module, each.name) for each in node.names}
                )

    def class_of(self, name: str) -> ast.ClassDef:
        return next(
            node for node in self.tree.body if isinstance(node, ast.ClassDef) and node.name == name
        )

    def literal(self, node: ast.expr) -> ast.expr:
        """The source text of a default value. A constant's name is replaced by its value, so that
        nothing is imported for it.
        """
        return self._constants[node.id] if isinstance(node, ast.Name) else node

    def rename(self, node: ast.expr, found: dict[str, str]) -> ast.expr:
        """The expression under names that mean the same in every module;
        `found` gets what to import.
        """

        class Renamer(ast.NodeTransformer):
            def visit_Name(self, name: ast.Name) -> ast.Name:
                if hasattr(builtins, name.id):
                    return name
                module, original = origins.get(name.id, (own, name.id))
                found[original] = f"from {module} import {original}"
                return ast.copy_location(ast.Name(original, name.ctx), name)

        origins, own = self._origins, self.name
        changed: ast.expr = Renamer().visit(node)
        return changed


def made(source: Source, module: Module, imports: Imports) -> str:
    """The text of a blocking class."""
    target = {"Consumer": "_consumer", "Client": "_client"}.get(source.name, "_part")
    parts = [f'class {source.blocking}({source.base}):\n    """{source.about}"""\n']
    if source.base == "BlockingPart":
        imports.types[source.name] = f"from {module.name} import {source.name}"
        parts.append(
            f"    def __init__(self, thread: LoopThread, part: {source.name}) -> None:\n"
            "        super().__init__(thread)\n        self._part = part\n"
        )
    methods: dict[str, str] = {}
    for own, name in [
        *[(Module(path), parent) for path, parent in source.parents],
        (module, source.name),
    ]:
        methods.update(
            {
                each.name: method(each, target, own, imports)
                for each in chosen(source, own.class_of(name))
            }
        )
    parts += methods.values()
    return "\n".join(parts)


def chosen(source: Source, node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for each in node.body:
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) or each.name.startswith(
            "_"
        ):
            continue
        if each.name not in source.left_out and (not source.methods or each.name in source.methods):
            yield each


def method(
    node: ast.FunctionDef | ast.AsyncFunctionDef, target: str, module: Module, imports: Imports
) -> str:
    """The text of a blocking method."""
    is_property = any(
        isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list
    )
    arguments = node.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if each.annotation is not None:
            each.annotation = module.rename(each.annotation, imports.types)
    arguments.defaults = [module.literal(each) for each in arguments.defaults]
    arguments.kw_defaults = [each and module.literal(each) for each in arguments.kw_defaults]
    assert node.returns is not None, f"{node.name} says what it returns"
    returns = ast.unparse(module.rename(node.returns, imports.types))
    is_generator = returns.startswith("AsyncIterator[")
    if is_generator:
        imports.types["Iterator"] = "from collections.abc import Iterator"
        returns = returns.removeprefix("Async")
    given = [each.arg for each in arguments.args[1:]] + [
        f"{each.arg}={each.arg}" for each in arguments.kwonlyargs
    ]
    called = f"self.{target}.{node.name}" + ("" if is_property else f"({', '.join(given)})")
    if returns in BLOCKING:
        more = ", self.interceptors" if returns == "Consumer" else ""
        body = (
            f"return {BLOCKING[returns]}(self._thread, self._thread.call(lambda: {called}){more})"
        )
        returns = BLOCKING[returns]
    elif is_property:
        body = f"return {called}"
    elif is_generator:
        body = f"return self._thread.iterate({called})"
    elif isinstance(node, ast.AsyncFunctionDef):
        body = (
            f"return self._thread.run({called})"
            if returns != "None"
            else f"self._thread.run({called})"
        )
    else:
        body = f"self._thread.call(lambda: {called})"
    docstring = ast.get_docstring(node, clean=False)
    lines = ["    @property"] if is_property else []
    lines.append(f"    def {node.name}({ast.unparse(arguments)}) -> {returns}:")
    lines += [f'        """{docstring}"""'] if docstring else []
    return "\n".join([*lines, f"        {body}", ""])


def generated(module: MadeModule) -> str:
    """The whole file, as `ruff` lays it out."""
    imports = Imports(module.imports)
    classes = [made(source, Module(source.path), imports) for source in module.sources]
    head = (
        f"{module.head}\n{MADE}\nfrom __future__ import annotations\n{module.imports}\n"
        f"{imports.text()}\n"
    )
    text = head + "\n\n".join(classes) + module.tail
    as_named = module.path.with_name("made.py")  # in an `__init__.py` ruff leaves unused imports
    for command in (
        ["check", "--select=I,F401,F811,TC", "--fix", "--quiet"],
        ["format", "--quiet"],
    ):
        done = subprocess.run(
            [Path(sys.executable).with_name("ruff"), *command, "--stdin-filename", as_named, "-"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        if not done.stdout:
            raise SystemExit(done.stderr)
        text = done.stdout
    return text


if __name__ == "__main__":
    for each in MODULES:
        each.path.write_text(generated(each))
