# SPDX-License-Identifier: Apache-2.0
"""Settings of a site's file, of a job's, and of flags, down to what the programs do with them."""

import argparse
from pathlib import Path

import pytest

from megatron.moevement.arguments import add_arguments, config_from_args
from moevement_ext.config import ConfigurationError
from moevement_ext.config_file import CONFIG_FLAG, SITE, from_files, sources, value_of
from moevement_ext.launch.launch_config import LaunchConfig, store_address, unnamed_run_id
from tools.plan.flags import parse_megatron_flags


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a job at a site, both with a file."""
    (tmp_path / 'site.toml').write_text('disk_every = 7\nreplicas = 0\ninterface = "ib0"\nmtbf = 9')
    (tmp_path / 'job.toml').write_text(
        'disk_every = 8\nwindow = 4\nelastic = "restart"\nmtbf = 9.5'
    )
    monkeypatch.setenv(SITE, str(tmp_path / 'site.toml'))
    return [CONFIG_FLAG, str(tmp_path / 'job.toml'), '--sparse-ckpt-window', 'auto']


@pytest.mark.parametrize('first', [True, False])
def test_flags_win_over_the_job_over_the_site(
    job: list[str], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = job if first else [*job[2:], f'{CONFIG_FLAG}={job[1]}']
    parser = add_arguments(argparse.ArgumentParser())
    args = parser.parse_args(
        [*flags, '--sparse-ckpt-strategy', 'gemini', '--sparse-ckpt-interval', 'daly']
    )
    config = config_from_args(args)
    assert (config.window, config.disk_every, config.replicas) == (1, 8, 0)
    assert (config.interface, config.elastic, config.mtbf) == ('ib0', 'restart', 9.5)
    monkeypatch.delenv(SITE)
    assert config_from_args(parser.parse_args([])).disk_every == 100  # nothing stays of a parse
    monkeypatch.setattr('sys.argv', ['program', *flags])
    assert parser.parse_args().sparse_ckpt_disk_every == 8


def test_every_setting_has_its_source(job: list[str]) -> None:
    site, own = (
        f'{job[1].replace("job", name)} ({by})'
        for name, by in (('site', SITE), ('job', CONFIG_FLAG))
    )
    assert sources(job) == {
        'disk_every': own, 'replicas': site, 'interface': site, 'mtbf': own, 'window': 'a flag',
        'elastic': own,
    }  # fmt: skip
    assert value_of(job, '--sparse-ckpt-window') == 'auto'
    assert value_of(job, '--sparse-ckpt-disk-every') == '8'
    assert value_of(job, '--sparse-ckpt-store') is None


def test_launchers_and_plans_read_the_files(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guests = LaunchConfig('p', tuple(job), nodes=3, when_no_spare='layout')
    assert guests.sizes == {1, 2, 3}
    assert parse_megatron_flags(job).fields('protection') == {'window': 'auto', 'replicas': 0}
    monkeypatch.setenv('SLURM_JOB_ID', '5')
    assert unnamed_run_id(job) == 'slurm-5' and store_address(job) is None
    (tmp_path / 'site.toml').write_text('run_id = "r"\nstore = "h:1"\nelastic_exact = true')
    assert unnamed_run_id(job) is None and store_address(job) == ('h', 1)
    with pytest.raises(ConfigurationError, match='reads no windows of other layouts'):
        LaunchConfig('p', tuple(job), nodes=3, when_no_spare='layout')


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('windw = 4', 'windw is no setting; did you mean window?'),
        ('nonsense = 4', 'nonsense is no setting'),
        ('[window]\nlength = 4', r"window = {'length': 4}: Expected `int | str`, got `object`."),
        ('replicas = 1.5', 'replicas = 1.5: Expected `int`, got `float`.'),
        ('strict = "yes"', "strict = 'yes': Expected `bool`, got `str`."),
        (
            'window',
            "Expected '=' after a key in a key/value pair (at end of document); give a TOML file.",
        ),
        (None, 'No such file or directory; give a TOML file.'),
    ],
)
def test_a_wrong_file_is_named_with_its_key(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / 'wrong.toml'
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        from_files([CONFIG_FLAG, str(file)])
    assert str(refused.value) == f'{CONFIG_FLAG} {file}: {message}'
    parser = add_arguments(argparse.ArgumentParser(prog='program'))
    with pytest.raises(SystemExit):
        parser.parse_args([CONFIG_FLAG, str(file)])
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f'program: error: {refused.value}')


def test_plain_megatron_reads_no_file_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SITE, '/missing.toml')
    parser = add_arguments(argparse.ArgumentParser())
    assert not parser.parse_args([]).sparse_ckpt
    with pytest.raises(SystemExit):
        parser.parse_args(['--sparse-ckpt'])
