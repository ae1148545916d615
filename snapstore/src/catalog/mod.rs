//! The catalog: what exists (teams, snapshots, sandboxes, templates, packs) as ordered keys with conditional transactions.
