"""Load generator behind `jaxinfer bench serve`: drives any OpenAI HTTP or vllm.grpc.engine server."""
