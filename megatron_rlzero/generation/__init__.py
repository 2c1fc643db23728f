"""The vLLM side: servers, their client, weights into them, reproducible sampling."""
