"""The value of a C expression of integers and booleans, by C's own rules of precedence and division."""

import re

TOKEN = re.compile(r"\s*(\d+|[A-Za-z_][\w.]*|&&|\|\||[<>=]=|[-+*/%<>?:(),])")
LEVELS = [("||",), ("&&",), ("==",), ("<", "<=", ">", ">="), ("+", "-"), ("*", "/", "%")]
APPLY = {
    "||": lambda x, y: int(bool(x or y)),
    "&&": lambda x, y: int(bool(x and y)),
    "==": lambda x, y: int(x == y),
    "<": lambda x, y: int(x < y),
    "<=": lambda x, y: int(x <= y),
    ">": lambda x, y: int(x > y),
    ">=": lambda x, y: int(x >= y),
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: int(x / y),  # towards zero
    "%": lambda x, y: x - int(x / y) * y,
}


class Parser:
    """Recursive descent; every operand is evaluated, so the dead branch of `?:` must not divide by zero."""

    def __init__(self, text, values):
        self.tokens = self.scan(text)
        self.values = values

    @staticmethod
    def scan(text):
        tokens, at = [], 0
        while text[at:].strip():
            found = TOKEN.match(text, at)
            assert found, f"no C token at: {text[at:]}"
            tokens.append(found.group(1))
            at = found.end()
        return [*tokens, ""]

    def take(self, *wanted):
        return self.tokens.pop(0) if self.tokens[0] in wanted else ""

    def expect(self, token):
        assert self.take(token), f"{token} expected before {self.tokens}"

    def expression(self):
        condition = self.binary(0)
        if not self.take("?"):
            return condition
        yes = self.expression()
        self.expect(":")
        no = self.expression()
        return yes if condition else no

    def binary(self, level):
        if level == len(LEVELS):
            return self.unary()
        value = self.binary(level + 1)
        while operator := self.take(*LEVELS[level]):
            value = APPLY[operator](value, self.binary(level + 1))
        return value

    def unary(self):
        if self.take("-"):
            return -self.unary()
        if self.take("("):
            value = self.expression()
            self.expect(")")
            return value
        token = self.tokens.pop(0)
        if token in ("min", "max"):
            return self.call({"min": min, "max": max}[token])
        return int(token) if token.isdigit() else {"true": 1, "false": 0, **self.values}[token]

    def call(self, function):
        self.expect("(")
        x = self.expression()
        self.expect(",")
        y = self.expression()
        self.expect(")")
        return function(x, y)


def c_value(text, values):
    """The value of a C expression; AssertionError where it is not one."""
    parser = Parser(text, values)
    value = parser.expression()
    assert parser.tokens == [""], f"left over: {parser.tokens}"
    return value
