"""Registries: a name, a function, and its keyword parameters with the defaults of its source.

A new algorithm is a new function and a `register` line. The config names functions and may set their
keyword parameters; a wrong name or parameter is refused here, before anything heavy starts, which is why
no module of this package needs torch to be imported.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, get_args

import msgspec

from penstock.algorithms.ranges import ANY, Range
from penstock.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """One catalogue entry, as `penstock list algorithms` prints it."""

    kind: str
    name: str
    summary: str
    parameters: dict[str, Any]


class Registry(Generic[Function]):
    """Functions of one kind by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, Function] = {}
        self._ordered: dict[str, tuple[str, str]] = {}

    def register(
        self, name: str, *, ordered: tuple[str, str] | None = None
    ) -> Callable[[Function], Function]:
        """`ordered` names two parameters of which the first must be at most the second."""

        def add(function: Function) -> Function:
            if name in self._functions:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._functions[name] = function
            if ordered is not None:
                self._ordered[name] = ordered
            return function

        return add

    def names(self) -> tuple[str, ...]:
        return tuple(self._functions)

    def get(self, name: str) -> Function:
        if name not in self._functions:
            raise ConfigError(f"unknown {self.kind} {name!r}; {_hint(name, self.names())}")
        return self._functions[name]

    def parameters(self, name: str) -> dict[str, Any]:
        """Keyword parameters of an entry with their defaults."""
        signature = inspect.signature(self.get(name))
        return {
            key: parameter.default
            for key, parameter in signature.parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }

    def bind(self, name: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
        """The function with these keyword parameters set."""
        function, known = self.get(name), self.parameters(name)
        for key in arguments:
            if key not in known:
                hint = _hint(key, tuple(known)) if known else "it takes none"
                raise ConfigError(f"unknown parameter {key!r} of {self.kind} {name!r}; {hint}")
        self._check_ranges(name, arguments)
        return functools.partial(function, **arguments)

    def _check_ranges(self, name: str, arguments: Mapping[str, Any]) -> None:
        parameters = inspect.signature(self.get(name)).parameters
        for key, value in arguments.items():
            within = next(
                (one for one in get_args(parameters[key].annotation) if isinstance(one, Range)), ANY
            )
            if isinstance(value, int | float) and not within.holds(value):
                raise ConfigError(f"{key} of {self.kind} {name!r} must be {within.rule}, got {value:g}")
        if name in self._ordered:
            low, high = self._ordered[name]
            values = {**self.parameters(name), **arguments}
            least, most = values[low], values[high]
            if not least <= most:
                raise ConfigError(
                    f"{low} of {self.kind} {name!r} must be at most {high}, got {least:g} and {most:g}"
                )

    def describe(self) -> tuple[Description, ...]:
        return tuple(
            Description(
                kind=self.kind,
                name=name,
                summary=(inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " "),
                parameters=self.parameters(name),
            )
            for name, function in self._functions.items()
        )


def _hint(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
