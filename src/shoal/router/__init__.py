"""The token router: reads prompts and answers, and sends each request where it costs least."""
