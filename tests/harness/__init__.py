"""What the whole-system tests and the demonstration share: a server to start and stop, raw HTTP beside the SDKs, the
accounts of what a server holds, and state to plant in a guest and find again."""
