//! Bringing up network interfaces with the classic `SIOC*` requests (`netdevice(7)`), which need no netlink library.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;

/// Gives `name` its address and prefix length and brings it up.
pub fn configure(name: &str, address: Ipv4Addr, prefix: u32) -> io::Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    let mask = Ipv4Addr::from(u32::MAX.checked_shl(32 - prefix).unwrap_or(0));
    let mut request = interface(name)?;
    request.ifr_ifru.ifru_addr = address_of(address);
    ioctl(&socket, libc::SIOCSIFADDR, &raw const request)?;
    request.ifr_ifru.ifru_addr = address_of(mask);
    ioctl(&socket, libc::SIOCSIFNETMASK, &raw const request)?;
    let flags = libc::IFF_UP | libc::IFF_RUNNING;
    request.ifr_ifru.ifru_flags = i16::try_from(flags).map_err(io::Error::other)?;
    ioctl(&socket, libc::SIOCSIFFLAGS, &raw const request)
}

/// Adds the default route through `gateway`.
pub fn default_route(gateway: Ipv4Addr) -> io::Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: every field of `rtentry` may be zero: numbers, null pointers, and addresses of family AF_UNSPEC.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = address_of(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = address_of(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = address_of(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    ioctl(&socket, libc::SIOCADDRT, &raw const route)
}

fn interface(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: `ifreq` is a name and a union of plain numbers: all zero is a value of it.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "interface name too long"));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    Ok(request)
}

/// A `sockaddr` of family AF_INET: two bytes of port, which do not count here, then the address (`ip(7)`).
fn address_of(address: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0; 14];
    for (to, from) in data[2..6].iter_mut().zip(address.octets()) {
        *to = from.cast_signed();
    }
    libc::sockaddr { sa_family: libc::AF_INET as libc::sa_family_t, sa_data: data }
}

fn ioctl<T>(socket: &UdpSocket, request: libc::c_ulong, argument: *const T) -> io::Result<()> {
    // SAFETY: each caller passes the structure that its request is documented to read.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), request, argument) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
