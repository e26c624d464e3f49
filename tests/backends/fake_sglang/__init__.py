"""SGLang in miniature: the objects that the plugin reads and extends, as far as it reads them."""
