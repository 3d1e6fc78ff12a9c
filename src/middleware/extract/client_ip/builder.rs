use std::num::NonZeroU8;

use http::HeaderName;

use super::super::header::header_name;
use super::ClientIp;
use super::trust::{Trust, Trusted, cover_all, untrusted};
use crate::error::ConfigError;

/// The header of a [`ClientIp`] whose trusted proxies are not set yet.
#[derive(Debug, Clone)]
#[must_use = "name the trusted proxies with `trust` or `hops`"]
pub struct ClientIpBuilder {
    header: Result<HeaderName, ConfigError>,
}

impl ClientIpBuilder {
    pub(super) fn new(header: &str) -> Self {
        Self {
            header: header_name(header),
        }
    }

    /// Trusts the proxies in these networks. Each is one of
    /// - a network, such as `"203.0.113.0/24"` or `"2001:db8::/32"`,
    /// - an address, such as `"203.0.113.7"`,
    /// - `"private"`: 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16 (RFC 1918), fc00::/7 (RFC 4193) and `"loopback"`,
    /// - `"loopback"`: 127.0.0.0/8 and ::1,
    /// - `"link-local"`: 169.254.0.0/16 and fe80::/10, from which some platforms forward requests,
    /// - `"shared"`: 100.64.0.0/10 (RFC 6598), the network of some platforms' load balancers and pods,
    /// - `"unix"`: a peer on a unix socket, and an entry `unix:`, which nginx writes for one. A peer without a recorded address also counts as one,
    ///   since axum records none for unix sockets. So a server that also listens on TCP must record
    ///   the addresses there.
    ///
    /// Name networks that contain only proxies. Any of their addresses may write any address into the header: with
    /// `"private"`, so may your office, if it reaches the service by private addresses.
    ///
    /// # Errors
    ///
    /// For any other text; for an address within a network, such as `10.0.0.5/8`; if the networks
    /// cover all addresses, such as `0.0.0.0/0` or its two halves; if there is no network; and if the
    /// name is not a valid header name.
    pub fn trust<T: AsRef<str>>(
        self,
        proxies: impl IntoIterator<Item = T>,
    ) -> Result<ClientIp, ConfigError> {
        let trusted = proxies
            .into_iter()
            .map(|proxies| proxies.as_ref().parse())
            .collect::<Result<Vec<_>, _>>();
        self.trusting(trusted)
    }

    pub(super) fn trusting(
        self,
        trusted: Result<Vec<Trusted>, ConfigError>,
    ) -> Result<ClientIp, ConfigError> {
        // The header first: its error is reported if both are wrong.
        let header = self.header?;
        let trusted = trusted?;
        if trusted.is_empty() {
            return Err(ConfigError::new(
                "no proxy is trusted: name at least one network",
            ));
        }
        if cover_all(&trusted) {
            let all: Vec<_> = trusted.iter().map(Trusted::to_string).collect();
            let problem = "together they cover every address, so any client could forge the header";
            return Err(untrusted(&all.join(", "), problem));
        }
        Ok(ClientIp::behind(header, Trust::Networks(trusted)))
    }

    /// Trusts this many proxies in a row, wherever they are. The peer is the first of them, also on a unix socket or
    /// without a recorded address.
    ///
    /// The client is then this entry from the right: `hops(1)` takes the last one, which the peer wrote. A header of
    /// fewer entries yields its first one. If that entry has no address, the next address to the right counts,
    /// or else the peer. A peer without a recorded address then counts as one on a unix socket, which is reported once
    /// as [misconfigured](crate::observe::Event::Misconfigured): over TCP, all requests without an entry would share
    /// that count.
    ///
    /// Use it for proxies whose addresses change. Every request must pass through all of them: a
    /// client that bypasses one, such as a CDN in front of a public load balancer, can choose the
    /// entry that counts.
    ///
    /// With a header of a [single value](ClientIp::header), only the peer matters, so every number
    /// means the same.
    ///
    /// # Errors
    ///
    /// For 0, since [`ClientIp::peer`] is for services without a proxy, and for a text that cannot be the name of a
    /// header.
    pub fn hops(self, hops: u8) -> Result<ClientIp, ConfigError> {
        let header = self.header?;
        let Some(hops) = NonZeroU8::new(hops) else {
            return Err(ConfigError::new(
                "no hop is trusted: trust at least 1, or use `ClientIp::peer` without a proxy",
            ));
        };
        Ok(ClientIp::behind(header, Trust::Hops(hops)))
    }
}
