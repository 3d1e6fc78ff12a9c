//! Feature `serde`: a `ClientIp` as a table.

use std::num::NonZeroU8;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error};
use serde::ser::{Serialize, Serializer};

use super::trust::{Trust, Trusted};
use super::{ClientIp, Forwarding};
use crate::error::{ConfigError, redacted};
use crate::limit::formats::{Field, Redacted, Setting, SettingList, deserialize, text};

const PEER: &str = "peer";

#[derive(Default, serde::Serialize, serde::Deserialize)]
#[serde(rename = "ClientIp", default, deny_unknown_fields)]
struct ClientIpTable {
    #[serde(skip_serializing_if = "Option::is_none")]
    header: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trust: Option<SettingList<Trusted>>,
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "hops")]
    hops: Option<NonZeroU8>,
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "ipv6_prefix"
    )]
    ipv6_prefix: Option<Bits>,
}

fn hops<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<NonZeroU8>, D::Error> {
    Field::new("hops").deserialize(deserializer).map(Some)
}

fn ipv6_prefix<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Bits>, D::Error> {
    Field::new("ipv6_prefix")
        .deserialize(deserializer)
        .map(Some)
}

deserialize!(ClientIp);

impl Setting for ClientIp {
    const EXPECTED: &'static str = "`peer`, or a header and who writes it, such as `{ header = \"x-forwarded-for\", trust = [\"private\"] }`";
    const ANY: bool = true;

    fn read(text: &str) -> Result<Self, ConfigError> {
        match text.trim() {
            PEER => Ok(Self::peer()),
            _ => Err(ConfigError::choice("client address", text, Self::EXPECTED)),
        }
    }

    fn read_table<'de, D: Deserializer<'de>>(table: D, _: Field<Self>) -> Result<Self, D::Error> {
        let ClientIpTable {
            header,
            trust,
            hops,
            ipv6_prefix,
        } = ClientIpTable::deserialize(Redacted(table))?;
        let client = match (header, trust, hops) {
            (None, None, None) => Ok(Self::peer()),
            (Some(header), Some(SettingList(trusted)), None) => Self::header(&header)
                .trusting(Ok(trusted))
                .map_err(D::Error::custom),
            (Some(header), None, Some(hops)) => Self::header(&header)
                .hops(hops.get())
                .map_err(D::Error::custom),
            (Some(header), None, None) => Err(D::Error::custom(format_args!(
                "no proxy is trusted to write {:?}: set `trust = [\"private\"]` or `hops = 1`",
                redacted(&header)
            ))),
            (Some(_), Some(_), Some(_)) => Err(D::Error::custom(
                "`trust` and `hops` are both set: remove one",
            )),
            // Without this error, `trust` or `hops` would have no effect.
            (None, ..) => Err(D::Error::custom(
                "the header that the trusted proxies write is missing: set it, such as `header = \"x-forwarded-for\"`",
            )),
        }?;
        match ipv6_prefix {
            Some(Bits(ipv6_prefix)) => Ok(Self {
                ipv6_prefix,
                ..client
            }),
            None => Ok(client),
        }
    }
}

impl Serialize for ClientIp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let peer = Self::peer();
        if *self == peer {
            return serializer.serialize_str(PEER);
        }
        let Self {
            forwarding,
            ipv6_prefix,
        } = self;
        let mut table = ClientIpTable::default();
        if *ipv6_prefix != peer.ipv6_prefix {
            table.ipv6_prefix = Some(Bits(*ipv6_prefix));
        }
        if let Some(Forwarding { header, trust, .. }) = forwarding {
            table.header = Some(header.to_string());
            match trust {
                Trust::Networks(trusted) => table.trust = Some(SettingList(trusted.clone())),
                Trust::Hops(hops) => table.hops = Some(*hops),
            }
        }
        table.serialize(serializer)
    }
}

deserialize!(SettingList<Trusted>);
text!(
    Trusted,
    "a network such as `203.0.113.0/24`, an address, `private`, `loopback`, `link-local`, `shared` or `unix`"
);

/// The length of an IPv6 prefix.
#[derive(serde::Serialize)]
struct Bits(u8);

impl Setting for Bits {
    const EXPECTED: &'static str = "a whole number from 1 to 128, such as `64`";
    const ANY: bool = true;

    fn read(text: &str) -> Result<Self, ConfigError> {
        match text.trim().parse() {
            Ok(bits @ 1..=128) => Ok(Self(bits)),
            _ => Err(ConfigError::choice("IPv6 prefix", text, Self::EXPECTED)),
        }
    }
}
