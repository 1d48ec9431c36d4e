"""The HTTP faces: OpenAI's routes and vLLM's additions, on Starlette.

Small pieces that every route uses: errors (bodies), body (reading JSON within limits), fields (sampling
fields), sse (streams), exchange (one request's calls), auth. Routes are lists named ROUTES.
"""
