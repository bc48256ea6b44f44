"""Write the pages of the docs that are made from something else: docstrings, the changelog and the list of pages.

docs/api.md         every public name, with its signature and its docstring
docs/changelog.md   CHANGELOG.md, with links that work on the site
docs/llms.txt       every page with its first sentence, for programs that read
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import yaml

import busload
from busload import SyncCommandBus

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / "src"
Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

INTRODUCTION = """\
# Docstrings

Every public name with its signature and its docstring, by the module it is imported from. `make figures` writes this
page. The [reference](reference.md) has the same names in tables, with links to the pages that explain them. Methods of
`CommandBus` are without `await` on `SyncCommandBus`, so the classes of `busload.sync` are left out here.
"""


# -- Docstrings ------------------------------------------------------------------------------------------------------


def public_modules() -> Iterator[ModuleType]:
    """`busload` itself and each of its folders that offers names, without the ones made from them."""
    yield busload
    folder = SOURCE / "busload"
    for path in sorted([*folder.glob("*/__init__.py"), *folder.glob("integrations/*/__init__.py")]):
        module = import_module(".".join(path.parent.relative_to(SOURCE).parts))
        if getattr(module, "__all__", None) and path.parent.name != "sync":
            yield module


def api_page() -> str:
    """The page of all public names. A name that `busload` offers is not told again under its folder."""
    parts, told = [INTRODUCTION], set()
    for module in public_modules():
        names = [name for name in module.__all__ if name not in told and not name.startswith("Sync")]
        told |= set(names)
        if names:
            parts.append(f"## {module.__name__}\n")
            parts.extend(f"### {name}\n\n{described(getattr(module, name))}" for name in sorted(names))
    return "\n".join(parts)


def described(thing: Any) -> str:
    """The signature and the docstring of a class or function, and those of the methods of a class."""
    lines = [signature(thing)]
    if documentation := inspect.getdoc(thing) if is_documented(thing) else None:
        lines.append(f"{documentation}\n")
    if isinstance(thing, type) and not issubclass(thing, Enum | BaseException):
        for name, member in methods(thing):
            lines.append(f"#### {thing.__name__}.{name}\n\n{signature(member)}")
            if documentation := inspect.getdoc(member):
                lines.append(f"{documentation}\n")
    return "\n".join(lines)


def is_documented(thing: Any) -> bool:
    """Whether the docstring is its own: dataclasses without one get their signature, and others that of a base."""
    node = node_of(thing)
    return node is not None and ast.get_docstring(node) is not None


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that busload defines, also those of bases, in the order of the alphabet.

    Those of a `SyncCommandBus` are told under `CommandBus`.
    """
    told = dir(SyncCommandBus) if issubclass(kind, SyncCommandBus) else ()
    for name in sorted(name for name in dir(kind) if not name.startswith("_") and name not in told):
        member = inspect.getattr_static(kind, name)
        member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        member = member.fget if isinstance(member, property) else getattr(member, "func", member)
        if isinstance(member, FunctionType) and node_of(member) is not None:
            yield name, member


def signature(thing: Any) -> str:
    """A block with what somebody types who uses it."""
    node = node_of(thing)
    if node is None:
        return ""
    if isinstance(node, ast.ClassDef):
        if issubclass(thing, Enum):
            return block(f"{node.name}: " + ", ".join(member.name for member in thing))
        return block(node.name + arguments_of(node))
    prefix = "async def " if isinstance(node, ast.AsyncFunctionDef) else "def "
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return block(f"{prefix}{node.name}({with_options(thing, without_self(node.args))}){returns}")


def with_options(function: Any, arguments: str) -> str:
    """Name the options that a call shares with others, which the source names by the class of all of them."""
    found = re.search(r"\*\*options: Unpack\[(\w+)\]", arguments)
    options = inspect.unwrap(function).__globals__.get(found[1]) if found else None
    if found is None or options is None:
        return arguments
    kinds = {name: getattr(kind, "__forward_arg__", str(kind)) for name, kind in options.__annotations__.items()}
    return arguments.replace(found[0], ", ".join(f"{name}: {kind} = ..." for name, kind in kinds.items()))


def arguments_of(node: ast.ClassDef) -> str:
    """What a class is called with: the arguments of `__init__`, or the fields of a dataclass."""
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            return f"({without_self(inner.args)})"
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = [ast.unparse(inner) for inner in node.body if isinstance(inner, ast.AnnAssign)]
        shown = [re.sub(r"field\(default=(.+?)(, \w+=.*)?\)$", r"\1", field) for field in fields if field[0] != "_"]
        return "(" + ", ".join(re.sub(r"field\(default_factory=(\w+).*\)$", r"\1()", field) for field in shown) + ")"
    return ""


def without_self(arguments: ast.arguments) -> str:
    return re.sub(r"^(self|cls)(: \w+)?(, |$)", "", ast.unparse(arguments))


def block(text: str) -> str:
    """A block of Python; a long list of arguments gets a line for each."""
    if len(text) > 100 and "(" in text:
        head, _, rest = text.partition("(")
        inside, _, tail = rest.rpartition(")")
        text = f"{head}(\n    " + ",\n    ".join(split_arguments(inside)) + f",\n){tail}"
    return f"```text\n{text}\n```\n"


def split_arguments(text: str) -> list[str]:
    """Split at the commas that are in no bracket and no text."""
    parts, depth, quote, part = [], 0, "", ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += (character in "([{") - (character in ")]}") if not quote else 0
        if character == "," and not depth and not quote:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    return [*parts, part.strip()]


@cache
def nodes(module: str) -> dict[str, Node]:
    """The classes and functions of a module, by their qualified names."""
    found: dict[str, Node] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, Node):
                found[prefix + node.name] = node
                walk(node.body, f"{prefix}{node.name}.")

    file = inspect.getsourcefile(import_module(module))
    assert file is not None
    walk(ast.parse(Path(file).read_text()).body, "")
    return found


def node_of(thing: Any) -> Node | None:
    thing = inspect.unwrap(thing) if callable(thing) else thing
    module = getattr(thing, "__module__", "")
    name = getattr(thing, "__qualname__", None)  # a constant has none
    return nodes(module).get(name) if name is not None and module.startswith("busload") else None


# -- Changelog -------------------------------------------------------------------------------------------------------


def changelog_page() -> str:
    """CHANGELOG.md as a page: its links lead to pages of the same folder."""
    return (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")


# -- llms.txt --------------------------------------------------------------------------------------------------------


def llms() -> str:
    """Every page of the site with its first sentence, by the sections of the navigation."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    lines = [f"# {site['site_name']}", "", f"> {first_sentences(DOCS / 'index.md', 2)}", ""]
    lines += [
        "Pages are Markdown in the folder `docs/` of the repository; the site renders them at the paths below.",
        "",
    ]
    for section in site["nav"]:
        for name, pages in section.items():
            lines += [f"## {name}", ""]
            lines += [f"- [{title}]({path_of(file)}): {first_sentences(DOCS / file)}" for title, file in entries(pages)]
            lines.append("")
    return "\n".join(lines)


def entries(pages: list[dict[str, str]]) -> Iterator[tuple[str, str]]:
    for page in pages:
        yield from page.items()


def path_of(file: str) -> str:
    return "./" if file == "index.md" else file.removesuffix(".md") + "/"


def first_sentences(page: Path, count: int = 1) -> str:
    """The beginning of a page, without links and marks."""
    texts = {"api.md": INTRODUCTION, "changelog.md": (ROOT / "CHANGELOG.md").read_text()}
    text = re.sub(r"^(<!--.*-->|```.*?^```)$", "", texts.get(page.name) or page.read_text(), flags=re.M | re.S)
    paragraph = next(part for part in text.split("\n\n")[1:] if re.match(r"[A-Za-z`\[]", part))
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(paragraph.split())).rstrip(":")
    return " ".join(re.split(r"(?<=[.?!]) (?=[A-Z`])", plain)[:count])


PAGES = {"api.md": api_page, "changelog.md": changelog_page, "llms.txt": llms}


if __name__ == "__main__":
    for name, made in PAGES.items():
        (DOCS / name).write_text(made())
