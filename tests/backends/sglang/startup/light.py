"""The plugin's modules in processes of SGLang, whether or not the plugin is enabled."""

# Once the entry point has wrapped SGLang's first functions.
ENTERED = [
    "nsa_plugin",
    "nsa_plugin.backends",
    "nsa_plugin.backends.sglang",
    "nsa_plugin.backends.sglang.startup",
    "nsa_plugin.backends.sglang.startup.activation",
    "nsa_plugin.backends.sglang.startup.hooks",
    "nsa_plugin.errors",
    "nsa_plugin.patches",
    "nsa_plugin.patches.ledger",
    "nsa_plugin.patches.section",
    "nsa_plugin.patches.sglang",
    "nsa_plugin.patches.sglang_portable",
    "nsa_plugin.switch",
]
# More of them where SGLang reads its command line.
READS_FLAGS = [
    "nsa_plugin.backends.sglang.startup.flags",
    "nsa_plugin.layouts",
    "nsa_plugin.libraries",
    "nsa_plugin.libraries.architectures",
    "nsa_plugin.libraries.capabilities",
    "nsa_plugin.libraries.manifest",
    "nsa_plugin.libraries.upstream",
    "nsa_plugin.settings",
]
