"""DeepSeek sparse attention (NSA / DSA) for SGLang and vLLM, as one plugin.

Importing this package imports neither torch nor an engine: the engines import it in every
process they start, and the command line must answer on machines that have neither.
"""

__version__ = "0.1.0"
