"""How the files read: ruff, shellcheck, old shells, line ends, machines' names, train_gpt.py."""
import ast
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHELL = ["run.sh", ".ci/run"]


def tool(name: str, *arguments: str) -> None:
    """A checker of tests/requirements.txt, which must be content."""
    path = shutil.which(name, path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    process = subprocess.run([path, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def git(*arguments: str) -> str:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout


@pytest.fixture(scope="module")
def tracked() -> dict[str, str]:
    """The text of every file under version control, also of those not yet added."""
    names = git("ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    paths = {name: ROOT / name for name in names if name and (ROOT / name).is_file()}
    contents = {name: path.read_bytes() for name, path in paths.items()}
    return {name: content.decode() for name, content in contents.items() if b"\0" not in content}


def test_ruff_finds_nothing():
    tool("ruff", "check", "--no-cache", "--output-format=concise")


def test_shellcheck_finds_nothing():
    tool("shellcheck", *SHELL)


# What came after bash 3.2, or goes wrong there, and shellcheck does not know: it has one bash.
AFTER_BASH_3 = {
    "change of case": r"\$\{\w+(\[[^]]*\])?(\^|,)",
    "${x@Q}": r"\$\{\w+(\[[^]]*\])?@[A-Za-z]\}",
    "negative index or length": r"\$\{\w+\[-|\$\{\w+:[^}-]*:\s*-\d",
    "associative array, reference or global": r"\b(declare|typeset|local)\s+-\w*[Ang]",
    "mapfile, readarray, coproc": r"\b(mapfile|readarray|coproc)\b",
    "&>> or |&": r"&>>|\|&",
    ";& or ;;& in case": r";;?&",
    "printf of the time, or -v into an element": r"%\(.*\)T|printf\s+-v\s+\w+\[",
    "[[ -v name ]]": r"(\[\[|\btest|\[)\s+(!\s+)?-[vR]\s",
    "{name}>file": r"\{\w+\}[<>]",
    "shopt of a later bash": r"\b(globstar|lastpipe|inherit_errexit|localvar_inherit)\b",
    "variable of a later bash": r"\b(EPOCHSECONDS|EPOCHREALTIME|BASHPID|SRANDOM|BASH_XTRACEFD)\b",
    "wait -n": r"\bwait\s+-\w*[np]",
    "read with a fraction of a second": r"\bread\b.*\s-\w*t\s*\d*\.\d",
    "an array, unset under set -u while it is empty": r"\$\{\w+\[[@*]\]\}",
    "here-document in $( )": r"\$\([^)]*<<-?\s*['\"\w]",
}


def code_lines(text: str) -> list[str]:
    """The lines of bash: without comments and here-documents."""
    lines = []
    end = None
    for line in text.splitlines():
        if end is None:
            lines.append(re.sub(r"(^|\s)#.*", "", line))
            if found := re.search(r"<<-?\s*'?(\w+)'?", lines[-1].replace("<<<", "")):
                end = found[1]
        elif line == end:
            end = None
    return lines


@pytest.mark.parametrize("name", SHELL)
def test_the_shell_of_macos_suffices(name):
    for line in code_lines((ROOT / name).read_text()):
        for what, pattern in AFTER_BASH_3.items():
            assert not re.search(pattern, line), f"{name}: {what}: {line}"


@pytest.mark.parametrize("line", [
    "${x^^}", "${x,}", "${x@Q}", "${x[-1]}", "${x:1:-1}", "declare -A x", "local -n x=y",
    "mapfile -t x", "a |& b", "a &>>b", "a) b ;;&", "printf '%(%s)T'", "[[ -v x ]]",
    "exec {fd}>x", "shopt -s globstar", "echo $EPOCHSECONDS", "wait -n", "read -t 0.5 x",
    'f "${x[@]}"', "x=$(cat <<EOF"])
def test_what_that_shell_does_not_know_is_found(line):
    assert any(re.search(pattern, line) for pattern in AFTER_BASH_3.values())


def test_checkouts_have_lf_line_ends_also_on_windows(tracked):
    names = sorted(tracked)
    attributes = git("check-attr", "-z", "text", "eol", "--", *names).split("\0")
    found = dict(zip(zip(attributes[::3], attributes[1::3]), attributes[2::3]))
    for name in names:
        assert found[name, "eol"] == "lf" and found[name, "text"] in ("set", "auto"), name
        assert "\r\n" not in tracked[name], name


# a path of the machine it was written on, or a host that packages came from
MACHINE = re.compile(r"(?<![\w.~/-])/(?:work|opt|root)\b|--(?:extra-)?index-url|"
                     r"(?:pypi|pythonhosted|artifactory|nexus|devpi|registry)[\w-]*\.[a-z]{2,}\b",
                     re.I)


def test_no_machine_is_named(tracked):
    for name, text in tracked.items():
        for line in text.splitlines():
            assert not MACHINE.search(line), f"{name}: {line}"


@pytest.mark.parametrize("parts, found", [
    ("at /|work/x", True), ('"/|root"', True), ("https://py|pi.org/simple", True),
    ("files.python|hosted.org", True), ("nex|us-3.lab.example.com/x", True),
    ("pip --index|-url=x", True), ("from PyPI.", False), ("network/|work", False),
    ("./|opt", False), ("the registry. It", False)])
def test_names_of_machines_are_found(parts, found):
    assert bool(MACHINE.search(parts.replace("|", ""))) == found


# train_gpt.py, which has to stay readable

@pytest.fixture(scope="module")
def tree() -> ast.Module:
    return ast.parse((ROOT / "train_gpt.py").read_text())


def annotations(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation:
            yield node.annotation
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns:
            yield node.returns


def types_in_quotes(tree: ast.AST) -> list[int]:
    """A type in quotes is used before it is defined: the order is wrong."""
    return [node.lineno for annotation in annotations(tree)
            for node in ast.walk(annotation)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def packed_assignments(tree: ast.AST) -> list[int]:
    """Several values computed in one statement. Names and constants are not computed."""
    def plain(value: ast.expr) -> bool:
        if isinstance(value, ast.UnaryOp):  # as in -1
            value = value.operand
        return isinstance(value, (ast.Constant, ast.Name, ast.Attribute))

    return [node.lineno for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            and any(isinstance(target, ast.Tuple) for target in node.targets)
            and not all(plain(value) for value in node.value.elts)]


def nested_conditionals(tree: ast.AST) -> list[int]:
    """A conditional expression that is directly a part of another one."""
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.IfExp)
            if any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse))]


@pytest.mark.parametrize("measure", [types_in_quotes, packed_assignments, nested_conditionals])
def test_train_gpt_has_none_of(tree, measure):
    assert measure(tree) == []


def test_train_gpt_has_no_line_over_100_columns():
    lines = (ROOT / "train_gpt.py").read_text().splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > 100] == []


@pytest.mark.parametrize("measure, code, found", [
    (types_in_quotes, 'def f(x: "A", y: list["B"]) -> "C": pass', 3),
    (types_in_quotes, 'x: "A" = 1', 1), (types_in_quotes, 'def f(x: A = "A") -> B: "text"', 0),
    (packed_assignments, "a, b = f(), 2", 1), (packed_assignments, "a, b = b, a.c", 0),
    (packed_assignments, "a, b = -1, 2.5", 0), (packed_assignments, "a, b = -f(), 2", 1),
    (packed_assignments, "a, b = f()", 0), (packed_assignments, "c = a, b = f(), 1", 1),
    (nested_conditionals, "a if b else c if d else e", 1),
    (nested_conditionals, "a if (b if c else d) else e", 1),
    (nested_conditionals, "a if b else c", 0)])
def test_the_measures_find_what_they_are_for(measure, code, found):
    assert len(measure(ast.parse(code))) == found
