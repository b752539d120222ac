"""A simulated step as a web page in one file (`--html`): no network, every number under the mouse."""
