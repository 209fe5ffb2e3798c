"""What the source says of a function or a class: signature, docstring, fields and methods, as they are written.

It reads source text, not live objects: Python keeps no docstrings of fields, and signatures look as in the code.
"""

import ast
import importlib
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a record."""

    name: str
    type: str
    default: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.type}" + ("" if self.default is None else f" = {self.default}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method or property that is not private."""

    name: str
    signature: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """A function, a class or an alias."""

    name: str
    module: str
    signature: str | None
    """None for classes."""
    text: str
    fields: tuple[Field, ...] = ()
    methods: tuple[Method, ...] = ()


def read(path: str) -> Documented:
    """Of `module:name`, from where the name is defined."""
    module, _, name = path.partition(":")
    found: Any = getattr(importlib.import_module(module), name)
    home = getattr(found, "__module__", module)
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        return _alias(module, name)
    node = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
    if isinstance(node, ast.ClassDef):
        fields, methods = _fields(node), _methods(node)
        return Documented(
            name=name, module=home, signature=None, text=_text(node), fields=fields, methods=methods
        )
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return Documented(name=name, module=home, signature=signature(node), text=_text(node))


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """In one line if it fits, otherwise with a line for each parameter."""
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {_type(node.returns)}" if node.returns is not None else ""
    parameters = [one for one in _parameters(node.args) if one not in ("self", "cls")]
    line = f"{kind} {node.name}({', '.join(parameters)}){returns}"
    if len(line) <= WIDTH:
        return line
    return f"{kind} {node.name}(\n" + "".join(f"    {one},\n" for one in parameters) + f"){returns}"


def _parameters(arguments: ast.arguments) -> list[str]:
    """As they are written, with their annotations and defaults."""
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*missing, *arguments.defaults]
    shown = [_parameter(one, default) for one, default in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        shown.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg is not None:
        shown.append(f"*{_parameter(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        shown.append("*")
    shown += [
        _parameter(one, default)
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        shown.append(f"**{_parameter(arguments.kwarg, None)}")
    return shown


def _parameter(one: ast.arg, default: ast.expr | None) -> str:
    if one.annotation is None:
        return one.arg if default is None else f"{one.arg}={_written(default)}"
    typed = f"{one.arg}: {_type(one.annotation)}"
    return typed if default is None else f"{typed} = {_written(default)}"


def _fields(node: ast.ClassDef) -> tuple[Field, ...]:
    fields = []
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            fields.append(
                Field(
                    name=statement.target.id,
                    type=_type(statement.annotation),
                    default=_written(statement.value) if statement.value is not None else None,
                    text=_string(after),
                )
            )
    return tuple(field for field in fields if not field.name.startswith("_"))


def _methods(node: ast.ClassDef) -> tuple[Method, ...]:
    methods = []
    for statement in node.body:
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) or statement.name.startswith(
            "_"
        ):
            continue
        decorators = {ast.unparse(one) for one in statement.decorator_list}
        if "property" in decorators:
            shown = f"{statement.name}: {_type(statement.returns) if statement.returns else 'Any'}"
        else:
            shown = signature(statement)
        methods.append(Method(name=statement.name, signature=shown, text=_text(statement)))
    return tuple(methods)


def _alias(module: str, name: str) -> Documented:
    """A name that something is assigned to, and the string after it."""
    body = ast.parse(inspect.getsource(importlib.import_module(module))).body
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.Assign) and _written(statement.targets[0]) == name:
            return Documented(name=name, module=module, signature=_written(statement), text=_string(after))
    raise LookupError(f"{module} assigns nothing to {name}; name the module that does")


def _written(node: ast.AST) -> str:
    """With double quotes, as all our code."""
    return ast.unparse(node).replace("'", '"')


def _type(node: ast.expr) -> str:
    """An annotation; one in quotes (a class that is not there yet) without them."""
    is_quoted = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return str(node.value) if is_quoted else _written(node)


def _text(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return ast.get_docstring(node) or ""


def _string(node: ast.stmt | None) -> str:
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return inspect.cleandoc(node.value.value)
    return ""
