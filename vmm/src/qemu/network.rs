//! Where QEMU's user network listens: read from `info usernet`, for want of a machine-readable answer in QEMU 7.2.
//!
//! ```text
//! Hub -1 (net):
//!   Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ
//!   TCP[HOST_FORWARD]  13       127.0.0.1 39643       10.0.2.15 49982     0     0
//! ```

use std::net::{IpAddr, SocketAddr};

use crate::shape::GuestPort;

/// The host's address of each guest port, or what is wrong with the listing.
pub fn ports(listing: &str) -> Result<Vec<(GuestPort, SocketAddr)>, String> {
    let forwards: Vec<(u16, SocketAddr)> = listing.lines().filter_map(forward).collect();
    GuestPort::ALL
        .into_iter()
        .map(|port| {
            let found = forwards.iter().find(|(number, _)| *number == port.number());
            let (_, address) = found.ok_or_else(|| format!("port {} not among {listing:?}", port.number()))?;
            Ok((port, *address))
        })
        .collect()
}

fn forward(line: &str) -> Option<(u16, SocketAddr)> {
    let mut fields = line.split_whitespace();
    if fields.next()? != "TCP[HOST_FORWARD]" {
        return None;
    }
    let address: IpAddr = fields.nth(1)?.parse().ok()?;
    let host: u16 = fields.next()?.parse().ok()?;
    let guest: u16 = fields.nth(1)?.parse().ok()?;
    Some((guest, SocketAddr::new(address, host)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = "Hub -1 (n0):\r
  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\r
  TCP[ESTABLISHED]   21       127.0.0.1 45619       10.0.2.15 49982     0     0\r
  TCP[HOST_FORWARD]  13       127.0.0.1 39643       10.0.2.15 49982     0     0\r
  TCP[HOST_FORWARD]  12       127.0.0.1 45619       10.0.2.15 49983     0     0\r
  TCP[HOST_FORWARD]   5       127.0.0.1 43769       10.0.2.15 49999     0     0\r
";

    #[test]
    fn every_port_is_found_and_connections_are_not_taken_for_listeners() {
        let found = ports(LISTING).expect("all three ports");
        let expected = [(GuestPort::Control, 39643), (GuestPort::Agent, 45619), (GuestPort::Interpreter, 43769)];
        assert_eq!(found, expected.map(|(port, number)| (port, SocketAddr::from(([127, 0, 0, 1], number)))));
    }

    #[test]
    fn a_missing_port_is_named() {
        let cut = LISTING.lines().take(4).collect::<Vec<_>>().join("\n");
        assert!(ports(&cut).expect_err("a port is missing").contains("49983"));
        assert!(ports("nonsense").is_err());
    }
}
