"""The environment of the templates: undefined names are errors, delimiters leave CUDA alone."""

import jinja2
import pytest

from flashgen.emit.env import environment


@pytest.mark.parametrize("source", ["${nothing}", "${s.missing}", "//% for x in nothing\n${x}\n//% endfor\n"])
def test_undefined_names_are_errors(source):
    with pytest.raises(jinja2.UndefinedError):
        environment().from_string(source).render(s={})


@pytest.mark.parametrize("name", ["wait_group", "copy_tile_async", "mma_sync"])
def test_a_macro_without_its_fields_raises(name):
    macro = getattr(environment().get_template("stmt/sm80.jinja").module, name)
    with pytest.raises(jinja2.UndefinedError):
        macro({"note": "", "body": ""})


def test_delimiters_leave_cuda_alone():
    cuda_text = 'int a[2] = {{1}, {2}};  // "100% {x}" #1\nif (a % b) { c = {0}; }\n'
    assert environment().from_string(cuda_text).render() == cuda_text
    assert environment().from_string("${x} = {${y}};\n").render(x="a", y=1) == "a = {1};\n"
