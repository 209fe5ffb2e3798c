"""Registries map a name to a function and its keyword parameters, with the defaults of the function's source.

A new algorithm is a new function and a `register` line, or a user's function that the config names by path.
The config may set keyword parameters. A wrong name or parameter is refused here, before anything heavy
starts; that is why every module of this package imports without torch.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast, get_args

import msgspec

from penstock.algorithms.ranges import ANY, Range
from penstock.errors import ConfigError, PenstockError, UserError
from penstock.usercode import is_function_path, load_function, where_raised

Function = TypeVar("Function", bound=Callable[..., Any])


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one entry as `penstock list algorithms` prints it."""

    kind: str
    name: str
    summary: str
    parameters: dict[str, Any]


class Registry(Generic[Function]):
    """Holds the functions of one kind by name, and loads those of users by path."""

    def __init__(
        self,
        kind: str,
        *,
        takes: tuple[str, ...],
        check: Callable[..., Any] = lambda result, *inputs: result,
    ) -> None:
        """`takes` names the arguments that every function is called with. `check(result, *inputs)` converts what
        a user's function returned into what the caller expects, or raises a `ValueError` that completes "must
        return …"."""
        self.kind = kind
        self._takes = takes
        self._check = check
        self._functions: dict[str, Function] = {}
        self._ordered: dict[str, tuple[str, str]] = {}

    def register(
        self, name: str, *, ordered: tuple[str, str] | None = None
    ) -> Callable[[Function], Function]:
        """Add a function under this name. `ordered` names two parameters of which the first must be at most the
        second."""

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
        """Return the function of this name, or load the user's function at this path."""
        if is_function_path(name):
            return cast(Function, load_function(name, what=self.kind))
        if name not in self._functions:
            raise ConfigError(
                f"unknown {self.kind} {name!r}; {_hint(name, self.names())} (name your own by path: "
                "module:function or file.py:function)"
            )
        return self._functions[name]

    def parameters(self, name: str) -> dict[str, Any]:
        """Return the keyword parameters of an entry with their defaults."""
        parameters = list(inspect.signature(self.get(name)).parameters.values())
        return {
            parameter.name: parameter.default
            for parameter in parameters[len(self._takes) :]
            if parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        }

    def bind(self, name: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the function with these keyword parameters set, after checking their names and values."""
        function = self.get(name)
        is_own = is_function_path(name)
        if is_own:
            self._check_signature(name, function)
        known = self.parameters(name)
        for key in arguments:
            if key not in known:
                hint = _hint(key, tuple(known)) if known else "it takes none"
                raise ConfigError(f"unknown parameter {key!r} of {self.kind} {name!r}; {hint}")
        missing = [
            key for key, value in known.items() if value is inspect.Parameter.empty and key not in arguments
        ]
        if missing:
            raise ConfigError(f"{self.kind} {name!r} needs a value for {', '.join(missing)}; none was given")
        self._check_ranges(name, arguments)
        bound = functools.partial(function, **arguments)
        return functools.partial(self._call_own, name, bound) if is_own else bound

    def check_name(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Refuse an unknown name or parameter. A path is checked only when the run is prepared: reading a config
        must not execute a user's file."""
        if not is_function_path(name):
            self.bind(name, arguments)

    def _check_signature(self, name: str, function: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(function).parameters.values())
        given = parameters[: len(self._takes)]
        if len(given) < len(self._takes) or any(
            one.kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for one in given
        ):
            raise ConfigError(
                f"the {self.kind} {name!r} must be a function of ({', '.join(self._takes)}) and its settings, got "
                f"one of ({', '.join(map(str, parameters))})"
            )

    def _call_own(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call a user's function. If it raises, or returns a wrong value, raise one sentence that names it."""
        try:
            result = function(*inputs)
        except PenstockError:
            raise
        except Exception as error:
            raise UserError(f"the {self.kind} {name!r} failed: {where_raised(error)}") from error
        try:
            return self._check(result, *inputs)
        except ValueError as error:
            raise UserError(f"the {self.kind} {name!r} must return {error}") from None
        except (TypeError, AttributeError) as error:
            raise UserError(
                f"the {self.kind} {name!r} has returned a {type(result).__name__}, which can't be used: {error}"
            ) from None

    def _check_ranges(self, name: str, arguments: Mapping[str, Any]) -> None:
        parameters = inspect.signature(self.get(name)).parameters
        for key, value in arguments.items():
            default = parameters[key].default
            if _is_number(default) and not _is_number(value):
                raise ConfigError(f"{key} of {self.kind} {name!r} must be a number, got {value!r}")
            within = next(
                (one for one in get_args(parameters[key].annotation) if isinstance(one, Range)), ANY
            )
            if _is_number(value) and not within.holds(value):
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _hint(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
