"""How the prose of this repository reads, in numbers.

    python tools/measure_words.py [--tree CHECKOUT] [--show N] [--seed S] [--json FILE]

- docstrings, and how many begin with a fragment: a first sentence without a verb of its own. The rule is a list
  of verbs, not a parser: a sentence passes if it begins with a verb (`Return …`, `Holds …`), or if a finite verb
  stands outside its subordinate clauses. It errs in both directions, equally on every tree.
- house words (STYLE 17) in the package and the docs.
- words of every page of docs.

`--show N` prints N fragments drawn by `--seed`.
"""

import argparse
import ast
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

BEGINS = set(
    """
accept account act adapt add adjust admit advance agree aim align allocate allow announce answer appear append
apply arrange arrive ask assemble assert assign attach attend average await batch become begin belong bind block
bound bring broadcast build call cancel cap capture carry cast change check choose chunk claim clamp clean clear
clip close collect combine come compare compile compose compress compute concatenate configure connect contain
continue convert copy correct cost count cover create cut damage deal decide declare decode decrease defer
define delete deliver depend derive describe detach detect diagnose differ disable discard dispatch distribute
divide draw drive drop dump emit enable encode end enforce enlarge enqueue ensure enter enumerate escape
estimate evaluate evict examine exclude execute expand expect expel expire explain export expose extend extract
fail feed fetch fill filter find fingerprint finish fit fix flush fold follow forget fork form format forward
free freeze fuse gather generate get give go group grow guard halve hand handle happen hash have hear hide hold
identify ignore implement import include increase index infer inform init insert install intercept interpret
interrupt intersect introduce invert issue iterate join judge keep kill know label lack last launch lay learn
leave let lie lift limit link list listen load locate lock log look loop lower make manage map mark mask match
materialize may mean measure meet merge mirror mix mount move multiply must name narrow need normalize note
notice notify number obtain offer omit open order outlast overlap own pack pad pair parse part pass patch pause
pay perform permit pick pin place plan play point poll pool post predict prefer prepare present prevent print
probe process produce project promise propagate protect prove provide prune publish pull push put queue quit
raise ramp rank reach read rebuild recall receive recognize recompute reconsider record recover reduce refer
refresh refuse register reject relate release reload remain remember remove rename render repeat replace replay
reply report represent request require reserve reset resize resolve respond restart restore restrict resume
retry return reuse reverse revive rewrite ring rise roll rotate round route run sample satisfy save say scale
scan schedule score search see seed select send separate serialize serve set settle shape shard share shift
shorten show shrink shuffle shut sign signal simulate sit skip sleep slice solve sort spare spawn speak specify
spell spend split spread stack stage stand start state stay step stick stop store stream strip subscribe
substitute subtract succeed suggest sum summarize supervise supply support surround swap switch take talk teach
tell terminate test thin throw tie time tokenise tokenize trace track train transfer transform translate travel
treat trim truncate try tune turn undo unite unload unmap unpack unwrap update upload use validate verify visit
wait wake walk want warm warn watch weigh weight whiten widen wire withdraw work wrap write yield zero
""".split()  # noqa: SIM905
)
IRREGULAR = {"has": "have", "does": "do", "goes": "go", "is": "be", "are": "be"}
FINITE = set(
    """
is are was were has have had does do did can cannot can't may must will would should might could isn't aren't
doesn't don't won't wasn't weren't hasn't haven't needn't it's that's there's failed ended raised came went kept
""".split()  # noqa: SIM905
)
SUBORDINATE = set(
    """
that which who whom whose where when if whether as while since because unless until although what how why before
after so than
""".split()  # noqa: SIM905
)
NOUN_BEFORE = set(
    """
the a an its their his her our your of no each every all some any one two this these those
""".split()  # noqa: SIM905
)
HOUSE_WORDS = (
    r"go(?:es|ing)? on\b", r"went on\b", r"\bwhoever\b", r"\bnobody\b", r"\bsomebody\b", r"\banybody\b",
    r"\blast words\b", r"\bsay-so\b", r"\bin a hurry\b", r"\bfor ever\b", r"\btold\b", r"\bmade-up\b",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="a checkout; this one")
    parser.add_argument("--show", type=int, default=0, help="print so many fragments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.tree)
    fragments = found.pop("fragments")
    assert isinstance(fragments, list)
    for name, value in found.items():
        print(f"{name:32} {value}")
    for line in random.Random(arguments.seed).sample(fragments, min(arguments.show, len(fragments))):
        print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


def measure(tree: Path) -> dict[str, object]:
    sources = [path for path in sorted(tree.glob("penstock/**/*.py")) if "bench" not in path.parts]
    pages = [
        path for path in sorted(tree.glob("docs/**/*.md")) if path.name not in ("api.md", "configuration.md")
    ]
    more = [
        tree / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md") if (tree / name).is_file()
    ]
    docstrings = [(where, first) for path in sources for where, first in first_sentences(path, tree)]
    fragments = [f"{where}: {first}" for where, first in docstrings if not is_sentence(first)]
    written = [path.read_text() for path in pages + more]
    code = [path.read_text() for path in sources]
    return {
        "docstrings": len(docstrings),
        "that begin with a fragment": len(fragments),
        "house words in the package": sum(map(house_words, code)),
        "house words in the docs": sum(map(house_words, written)),
        "words of docs, written": sum(len(text.split()) for text in written),
        "words of docs, generated": sum(
            len((tree / "docs" / name).read_text().split()) for name in ("api.md", "configuration.md")
        ),
        "fragments": fragments,
    }


def first_sentences(path: Path, tree: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                name = "" if isinstance(node, ast.Module) else f":{node.name}"
                yield f"{path.relative_to(tree)}{name}", re.split(r"(?<=[.!?:])\s", " ".join(text.split()))[0]


def is_sentence(text: str) -> bool:
    """Whether it has a verb of its own, by the lists above."""
    plain = re.sub(r"`[^`]*`", "X", text)
    plain = re.sub(r"\([^)]*\)", "", plain)
    words = re.findall(r"[A-Za-z']+|[,;:]", plain)
    if not words:
        return False
    if _base(words[0].lower()) in BEGINS or words[0].lower() == "don't":
        return True
    if (
        words[0].lower() in SUBORDINATE | {"in", "on", "with", "without", "for", "at", "once", "by", "of"}
        and "," in words
    ):
        words = words[words.index(",") + 1 :]
    main = []
    for word in words:
        if word.lower() in SUBORDINATE:
            break
        main.append(word.lower())
    for before, word in zip(["the", *main], main, strict=False):
        if word in FINITE:
            return True
        if before not in NOUN_BEFORE and word not in BEGINS and _base(word) in BEGINS:
            return True
    return any(
        _has_relative_subject(words, index) for index, word in enumerate(words) if word.lower() in FINITE
    )


def _has_relative_subject(words: list[str], index: int) -> bool:
    """Whether a finite verb follows a whole relative clause: `A group that failed is dropped.`"""
    before = [word.lower() for word in words[:index]]
    clauses = sum(word in SUBORDINATE for word in before)
    verbs = sum(word in FINITE or (word not in BEGINS and _base(word) in BEGINS) for word in before)
    return 0 < clauses <= verbs and "," not in before


def _base(word: str) -> str:
    """The base form of a verb in the third person."""
    if word in IRREGULAR:
        return IRREGULAR[word]
    for ending, instead in (
        ("ies", "y"),
        ("sses", "ss"),
        ("shes", "sh"),
        ("ches", "ch"),
        ("xes", "x"),
        ("es", "e"),
        ("s", ""),
    ):
        if word.endswith(ending) and word.removesuffix(ending) + instead in BEGINS:
            return word.removesuffix(ending) + instead
    return word


def house_words(text: str) -> int:
    return sum(len(re.findall(pattern, text, re.IGNORECASE)) for pattern in HOUSE_WORDS)


if __name__ == "__main__":
    main()
