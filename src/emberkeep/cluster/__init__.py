"""Several servers as one: replicas on Ray Serve, behind a gateway that sends each request to what knows it."""
