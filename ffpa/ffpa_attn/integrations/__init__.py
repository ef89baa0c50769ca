"""Has attention under the names that other libraries call it by; importing this imports none of them."""

from . import transformers as transformers
