# vLLM with the plugin. Build the wheel first:
#   make build && docker build -f docker/vllm.Dockerfile -t nsa-plugin-vllm .
ARG ENGINE_TAG=v0.33.0
FROM vllm/vllm-openai:${ENGINE_TAG}
COPY dist/*.whl /tmp/nsa-plugin/
# The engine brings everything that the plugin requires; --no-deps leaves the versions of the image alone.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --no-deps /tmp/nsa-plugin/*.whl \
    && rm -r /tmp/nsa-plugin \
    && nsa-plugin --help >/dev/null
