use ipnet::{IpNet, Ipv4Net};

/// Converts a network of IPv4-mapped addresses to IPv4, since addresses are compared as IPv4.
pub(super) fn unmapped(network: IpNet) -> IpNet {
    let IpNet::V6(v6) = network else {
        return network.trunc();
    };
    // A shorter prefix covers other IPv6 addresses too.
    if let Some(address) = v6.network().to_ipv4_mapped()
        && let Some(prefix) = v6.prefix_len().checked_sub(96)
        && let Ok(mapped) = Ipv4Net::new(address, prefix)
    {
        return IpNet::V4(mapped);
    }
    network.trunc()
}
