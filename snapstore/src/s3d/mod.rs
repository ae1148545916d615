//! The embedded S3 endpoint: the few operations the store uses, served on loopback from a local directory.
