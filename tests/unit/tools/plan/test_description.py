# SPDX-License-Identifier: Apache-2.0
"""Files are read into checked descriptions; what is wrong is named with file, field and rule."""

import importlib.util
import json

import msgspec
import pytest

from tools.plan.description import DescriptionError, Training, read, read_operators
from tools.plan.presets import CLUSTERS, PRESETS, Cluster
from tools.simulate.profile import Profile


@pytest.fixture
def written(tmp_path):
    def write(content, name='file.json'):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_operators_keep_their_order(written):
    path = written(
        [
            {'name': 'b', 'full_bytes': 12, 'weight_bytes': 2},
            {'name': 'a', 'full_bytes': 6, 'weight_bytes': 0},
        ]
    )
    found = read_operators(path)
    assert found.names == ['b', 'a']
    assert (found.full.tolist(), found.weights.tolist()) == ([[12], [6]], [[2], [0]])


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ([{'name': 'a', 'full_bytes': 12}], r'weight_bytes.*\$\[0\]'),
        ([{'name': 'a', 'full_bytes': 'x', 'weight_bytes': 1}], r'\$\[0\]\.full_bytes'),
        ([{'name': 'a', 'full_bytes': 1, 'weight_bytes': 1, 'rank': 0}], 'rank'),
        ([{'name': 'a', 'full_bytes': 1, 'weight_bytes': 2}], "'a'.*weights <= full"),
        ([{'name': 'a', 'full_bytes': -1, 'weight_bytes': -1}], "'a'.*0 <= weights"),
        (2 * [{'name': 'a', 'full_bytes': 2, 'weight_bytes': 1}], r"more than once: \['a'\]"),
        ([{'name': 'a', 'full_bytes': 10**20, 'weight_bytes': 1}], r'\$\[0\]\.full_bytes'),
        ('[{', 'truncated'),
        ({}, 'array'),
    ],
)
def test_wrong_operators_are_named(written, content, message):
    path = written(content)
    with pytest.raises(DescriptionError, match=message) as caught:
        read_operators(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize('name', ['deepseek-v3', 'moe-llava'])
def test_presets_survive_a_file(written, name):
    preset = PRESETS[name]
    assert read(written(msgspec.to_builtins(preset)), Training) == preset


def test_cluster_is_read_from_a_file(written):
    cluster = CLUSTERS['a100']
    assert read(written(msgspec.to_builtins(cluster)), Cluster) == cluster


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'gpus': 1}, 'unknown field `gpus`'),
        ({'peak_flops': 0}, 'peak_flops: is 0'),
        ({'gpus_per_node': 'x'}, r'gpus_per_node'),
    ],
)
def test_wrong_cluster_is_named(written, change, message):
    with pytest.raises(DescriptionError, match=message):
        read(written({**msgspec.to_builtins(CLUSTERS['a100']), **change}), Cluster)


def test_missing_sections_and_files_are_named(written, tmp_path):
    with pytest.raises(DescriptionError, match=r'missing required field `name` - at `\$\.model`'):
        read(written({'model': {}}), Training)
    with pytest.raises(DescriptionError, match='none.json: No such file'):
        read(tmp_path / 'none.json', Training)


def test_a_file_without_end_is_no_crash(written):
    with pytest.raises(DescriptionError, match='nested too deeply'):
        read(written('{"x": ' + '[' * 100_000), Profile)


def test_yaml_is_read_or_its_package_is_requested(written):
    path = written('- {name: a, full_bytes: 12, weight_bytes: 2}\n', 'operators.yaml')
    if importlib.util.find_spec('yaml'):
        assert read_operators(path).full.tolist() == [[12]]
    else:
        with pytest.raises(DescriptionError, match='PyYAML'):
            read_operators(path)
