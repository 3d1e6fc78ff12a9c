use ipnet::{IpNet, Ipv4Net};

/// Converts a network of IPv4-mapped addresses to IPv4, since addresses are compared as IPv4.
pub(super) fn unmapped(network: IpNet) -> IpNet {
    let IpNet::V6(v6) = network else {
        return network.trunc();
    };
    let v4 = v6
        .network()
        .to_ipv4_mapped()
        .zip(v6.prefix_len().checked_sub(96));
    v4.and_then(|(address, prefix)| Ipv4Net::new(address, prefix).ok())
        .map_or(network.trunc(), IpNet::V4)
}
