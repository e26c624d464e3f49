# SGLang with the plugin. Build the wheel first:
#   make build && docker build -f docker/sglang.Dockerfile -t nsa-plugin-sglang .
ARG ENGINE_TAG=v0.5.23
FROM lmsysorg/sglang:${ENGINE_TAG}
COPY dist/*.whl /tmp/nsa-plugin/
# The engine brings everything that the plugin requires; --no-deps leaves the versions of the image alone.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --no-deps /tmp/nsa-plugin/*.whl \
    && rm -r /tmp/nsa-plugin \
    && nsa-plugin --help >/dev/null
