"""The errors of nsa-plugin. Each message has the problem, its place and the allowed values."""


class NsaPluginError(Exception):
    """Base of every error that the plugin raises on purpose."""


class SettingsError(NsaPluginError):
    """A setting is unknown, ill-typed, out of range, or contradicts the model or the device."""


class ShapeError(NsaPluginError):
    """A ModelShape or BatchShape has contradictory values."""


class NoProviderError(NsaPluginError):
    """No installed kernel library supports a batch; the message lists each and why not."""


class LeftToStockError(NsaPluginError):
    """The plugin does not support a configuration that the stock engine serves.

    Nothing is wrong: the stock engine serves it, the start-up report says why, and only `strict` "full" ends the start.
    """


class PatchError(NsaPluginError):
    """A change to an engine's own object could not be applied or verified."""
