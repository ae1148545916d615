//! The API tier against scripted tiers behind it: a catalog, a scheduler and a node that remember what they were
//! asked, and a guest gateway that leads to servers in this process. Whole-system tests cover the real ones.

mod bad_input;
mod hang_up;
mod lifecycle;
mod proxy;
mod proxy_reuse;
mod proxy_streams;
mod rest;
mod support;
