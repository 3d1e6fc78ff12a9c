//! The compiler's errors for wrong arguments: they contain this crate's texts, which name the fix.

use std::collections::BTreeMap;
use std::env;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use serde_json::Value;

/// The library and its dependencies by name, compiled for its API only, as cargo reports their paths. Their folder also has other
/// builds of them, such as those of another clone with the same target folder.
static LIBRARIES: LazyLock<BTreeMap<String, PathBuf>> = LazyLock::new(|| {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
    // Build scripts depend on the variables that describe this package, so that others would have them run again.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&name);
        }
    }
    let output = cargo
        .args(["check", "--package", "tower-redis-ratelimit", "--lib"])
        .args(["--all-features", "--message-format=json", "--target-dir"])
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let mut libraries = BTreeMap::new();
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let message: Value = serde_json::from_str(line).unwrap();
        let files = message["filenames"].as_array().into_iter().flatten();
        let mut files = files.filter_map(Value::as_str);
        if let Some(file) = files.find(|file| file.ends_with(".rmeta")) {
            let name = message["target"]["name"].as_str().unwrap();
            libraries.insert(name.replace('-', "_"), PathBuf::from(file));
        }
    }
    libraries
});

/// Returns the compiler's error for these statements, or `None` if they compile.
fn complaint(statements: &str) -> Option<String> {
    let program = format!(
        "use tower_redis_ratelimit::{{extract::*, reject::*, select::*, settle::*, store::*, *}};
         pub fn main() -> Result<(), ConfigError> {{
             let policy = Policy::new(\"api\", Strategy::Gcra, Quota::per_second(50))?;
             {statements}
             Ok(())
         }}"
    );
    let out = tempfile::tempdir().unwrap();
    let mut compiler = Command::new(env::var_os("RUSTC").unwrap_or("rustc".into()));
    compiler
        .args(["--edition=2024", "--crate-type=lib", "--emit=metadata"])
        .arg("--out-dir")
        .arg(out.path());
    for name in [
        "tower_redis_ratelimit",
        "http",
        "tower_layer",
        "tower_service",
    ] {
        let path = &LIBRARIES[name];
        let folder = path.parent().unwrap();
        compiler
            .arg(format!("--extern={name}={}", path.display()))
            .arg(format!("-Ldependency={}", folder.display()));
    }
    let mut compiler = compiler
        .arg("-")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    compiler
        .stdin
        .take()
        .unwrap()
        .write_all(program.as_bytes())
        .unwrap();
    let output = compiler.wait_with_output().unwrap();
    (!output.status.success()).then(|| String::from_utf8(output.stderr).unwrap())
}

/// Checks that the error for the wrong statements contains all these texts, and that the right ones
/// compile.
fn fixes(wrong: &str, texts: &[&str], right: &str) {
    let complaint = complaint(wrong).expect("this must not compile");
    for text in texts {
        assert!(
            complaint.contains(text),
            "`{text}` is missing in\n{complaint}"
        );
    }
    assert_eq!(self::complaint(right), None);
}

#[test]
fn a_wrong_store_type_lists_the_stores() {
    fixes(
        "RateLimitLayer::new(\"redis://127.0.0.1/\", Global, policy);",
        &[
            "`&str` does not implement `Store`",
            "stores are `RedisStore`, `LocalStore`, and `Fallback::new(redis, local)`",
        ],
        "let redis = RedisStore::connect_lazy(\"redis://127.0.0.1/\")?;
         RateLimitLayer::new(Fallback::new(redis, LocalStore::default()), Global, policy);",
    );
}

#[test]
fn a_result_for_a_value_suggests_the_question_mark() {
    fixes(
        "RateLimitLayer::new(RedisStore::connect_lazy(\"redis://127.0.0.1/\"), Global, policy);",
        &[
            "ConfigError>` does not implement `Store`",
            "add `?`, as in `RedisStore::connect_lazy(url)?`",
        ],
        "RateLimitLayer::new(RedisStore::connect_lazy(\"redis://127.0.0.1/\")?, Global, policy);",
    );
    fixes(
        "Fallback::new(RedisStore::connect_lazy(\"redis://127.0.0.1/\"), LocalStore::default());",
        &["add `?`, as in `RedisStore::connect_lazy(url)?`"],
        "Fallback::new(RedisStore::connect_lazy(\"redis://127.0.0.1/\")?, LocalStore::default());",
    );
    fixes(
        "RateLimitLayer::new(LocalStore::default(), HeaderKey::new(\"x-api-key\"), policy);",
        &[
            "ConfigError>` finds no key in a request",
            "add `?`, as in `HeaderKey::new(\"x-api-key\")?`",
        ],
        "RateLimitLayer::new(LocalStore::default(), HeaderKey::new(\"x-api-key\")?, policy);",
    );
    fixes(
        "RateLimitLayer::new(LocalStore::default(), Global, Policy::new(\"api\", Strategy::Gcra, Quota::per_second(50)));",
        &[
            "ConfigError>` gives no policies for a request",
            "add `?`, as in `Policy::new(name, strategy, quota)?`",
        ],
        "RateLimitLayer::new(LocalStore::default(), Global, Policy::new(\"api\", Strategy::Gcra, Quota::per_second(50))?);",
    );
}

#[test]
fn a_vec_of_policies_suggests_policies() {
    for policies in ["vec![policy]", "[policy]"] {
        fixes(
            &format!("RateLimitLayer::new(LocalStore::default(), Global, {policies});"),
            &["gives no policies for a request", "`Policies::new([..])?`"],
            "RateLimitLayer::new(LocalStore::default(), Global, Policies::new([policy])?);",
        );
    }
}

#[test]
fn a_rejecting_closure_must_return_a_response() {
    fixes(
        "RateLimitLayer::new(LocalStore::default(), Global, policy)
             .reject_with(|rejection| (rejection.status(), \"Not so fast\"));",
        &["&str)` is not a response", "the closure must return an `http::Response`", "`.into_response()`"],
        "RateLimitLayer::new(LocalStore::default(), Global, policy)
             .reject_with(|rejection| HttpReject::new().reject(rejection).map(|text: String| text.len()));",
    );
}

#[test]
fn a_key_closure_must_return_an_option() {
    fixes(
        "CallLimitLayer::<_, _, String>::new(LocalStore::default(), |_: &String| Key::GLOBAL, policy);",
        &[
            "finds no key in a request",
            "a closure: `key_fn(|request| ..)`",
            "returns an `Option<Key>`",
        ],
        "CallLimitLayer::<_, _, String>::new(LocalStore::default(), |_: &String| Some(Key::GLOBAL), policy);",
    );
}

/// The compiler reports these errors before it reads this crate's texts. The docs of `key_fn` quote
/// them.
#[test]
fn a_closure_without_key_fn_does_not_compile() {
    for (closure, text) in [
        (
            "|request| Some(Key::new(request.uri.path()))",
            "type annotations needed",
        ),
        (
            "|_| Some(Key::GLOBAL)",
            "implementation of `FnOnce` is not general enough",
        ),
    ] {
        fixes(
            &format!("RateLimitLayer::new(LocalStore::default(), {closure}, policy);"),
            &[text],
            &format!("RateLimitLayer::new(LocalStore::default(), key_fn({closure}), policy);"),
        );
    }
}

#[test]
fn only_results_of_takes_must_be_used() {
    let asks = |what: &str| {
        format!(
            "#[deny(unused_must_use)]
             async fn ask(limiter: Limiter<LocalStore>) -> Result<(), StoreError> {{
                 {what};
                 Ok(())
             }}"
        )
    };
    for done in [
        "reset(Key::GLOBAL)",
        "charge(Key::GLOBAL, 1)",
        "refund(Key::GLOBAL, 1)",
    ] {
        fixes(
            &asks("limiter.take(Key::GLOBAL, 1).await?"),
            &["unused `Decision` that must be used", "it may be a denial"],
            &asks(&format!("limiter.{done}.await?")),
        );
    }
}

#[test]
fn a_wrong_extractor_type_lists_the_extractors() {
    fixes(
        "RateLimitLayer::new(LocalStore::default(), \"x-api-key\", policy);",
        &[
            "`&str` finds no key in a request",
            "`PeerIp`, `ClientIp`, `HeaderKey`, `Global`",
            "`key_fn(|request| ..)`",
        ],
        "RateLimitLayer::new(LocalStore::default(), key_fn(|request| Some(Key::new(request.uri.path()))), policy);",
    );
}

#[test]
fn a_boxed_extractor_needs_a_type() {
    let layer = |boxed: &str| {
        format!(
            "let _: RateLimitLayer<LocalStore, Box<dyn KeyExtractor>> =
                 RateLimitLayer::new(LocalStore::default(), {boxed}, policy).dry_run();"
        )
    };
    fixes(
        &layer("Box::new(PeerIp)"),
        &[
            "finds no key in a request",
            "`Box::new(extractor) as Box<dyn KeyExtractor>`",
        ],
        &layer("Box::new(PeerIp) as Box<dyn KeyExtractor>"),
    );
}

#[test]
fn a_wrong_selector_type_lists_the_selectors() {
    fixes(
        "RateLimitLayer::new(LocalStore::default(), Global, \"50/s\");",
        &[
            "`&str` gives no policies for a request",
            "`Policy::new(name, strategy, quota)?`",
            "`policies_fn(|request| ..)`",
        ],
        "let policies = Policies::from(policy);
         RateLimitLayer::new(LocalStore::default(), Global, policies_fn(move |request| {
             (request.uri.path() != \"/health\").then(|| policies.clone())
         }));",
    );
}

#[test]
fn a_wrong_live_type_lists_the_selectors() {
    fixes(
        "RateLimitLayer::new(LocalStore::default(), Global, Live::new(\"50/s\"));",
        &[
            "Live<&str>` gives no policies for a request",
            "`Policy::new(name, strategy, quota)?`",
        ],
        "RateLimitLayer::new(LocalStore::default(), Global, Live::new(policy));",
    );
}

#[test]
fn wrong_request_types_suggest_a_closure() {
    fixes(
        "CallLimitLayer::<_, _, String>::new(LocalStore::default(), PeerIp, policy);",
        &[
            "not a `KeyExtractor` for `std::string::String`",
            "a closure with the type of its argument, as in `|job: &Job| ..`",
        ],
        "CallLimitLayer::new(LocalStore::default(), |job: &String| Some(Key::new(job)), policy);",
    );
    fixes(
        "CallLimitLayer::<_, _, String>::new(LocalStore::default(), Global, \"50/s\");",
        &[
            "not a `PolicySelector` for `std::string::String`",
            "a closure with the type of its argument, as in `|job: &Job| ..`",
        ],
        "let policies = Policies::from(policy);
         CallLimitLayer::new(LocalStore::default(), Global, move |_: &String| policies.clone());",
    );
}

#[test]
fn a_client_ip_without_trust_suggests_trust() {
    fixes(
        "RateLimitLayer::new(LocalStore::default(), ClientIp::x_forwarded_for(), policy);",
        &[
            "`ClientIpBuilder` finds no key in a request",
            "`ClientIp::x_forwarded_for().trust([\"private\"])?`",
        ],
        "RateLimitLayer::new(LocalStore::default(), ClientIp::x_forwarded_for().trust([\"private\"])?, policy);",
    );
}

#[test]
fn an_unsupported_body_names_the_fix() {
    let answers = |reject: &str| {
        format!(
            "fn answers<S, K, R: Reject<bool>>(_: RateLimitLayer<S, K, R>) {{}}
             answers(RateLimitLayer::new(LocalStore::default(), Global, policy){reject});"
        )
    };
    fixes(
        &answers(""),
        &[
            "HttpReject` cannot answer a rejected request with the body `bool`",
            "`.reject_with(|rejection| HttpReject::new().reject(rejection).map(|text: String| ..))`",
        ],
        &answers(
            ".reject_with(|rejection| HttpReject::new().reject(rejection).map(|text: String| text.is_empty()))",
        ),
    );
}

/// A tonic server's body implements `Default`, but cannot be created from text.
#[test]
fn a_grpc_body_suggests_the_grpc_reject() {
    let answers = |reject: &str| {
        format!(
            "#[derive(Default)]
             struct Body;
             fn answers<S, K, R: Reject<Body>>(_: RateLimitLayer<S, K, R>) {{}}
             answers(RateLimitLayer::new(LocalStore::default(), Global, policy){reject});"
        )
    };
    fixes(
        &answers(""),
        &[
            "HttpReject` cannot answer a rejected request with the body `Body`",
            "gRPC, as of a tonic server: `.reject(GrpcReject::new())`",
            "with the feature `tonic`",
        ],
        &answers(match cfg!(feature = "tonic") {
            true => ".reject(GrpcReject::new())",
            false => {
                ".reject_with(|rejection| HttpReject::new().reject(rejection).map(|_: String| Body))"
            }
        }),
    );
}

#[test]
fn a_wrong_settlement_rule_names_its_type() {
    fixes(
        "RateLimitLayer::new(LocalStore::default(), Global, policy).settle(|response| response.status == 401);",
        &["expected `Settlement`, found `bool`"],
        "RateLimitLayer::new(LocalStore::default(), Global, policy).settle(|response| match response.status.as_u16() {
             401 => Settlement::Keep,
             _ => Settlement::Refund,
         });",
    );
}

#[test]
fn a_number_is_a_key_by_from() {
    for function in ["new", "secret"] {
        fixes(
            &format!("Key::{function}(42);"),
            &[
                "is not the text or the bytes of a key",
                "a number or an address: `Key::from(42)`, `Key::ip(address)`",
            ],
            &format!("Key::from(42); Key::{function}(\"42\"); Key::{function}([4, 2]);"),
        );
    }
}

/// The compiler reports this error before it reads this crate's texts. The docs of `by_extension` quote it.
#[test]
fn a_borrowed_key_of_an_extension_does_not_compile() {
    let by =
        |key: &str| format!("struct User {{ name: String }} by_extension(|user: &User| {key});");
    fixes(
        &by("user.name.as_str()"),
        &["lifetime may not live long enough"],
        &by("Key::new(&user.name)"),
    );
}

#[test]
fn a_key_of_an_extension_is_bytes_or_a_number() {
    let by = |key: &str| {
        format!(
            "struct Id; struct User {{ id: Id, name: String }} by_extension(|user: &User| {key});"
        )
    };
    let problem = "is not a key: return a number, or `Key::new(..)` of a text or of bytes";
    fixes(
        &by("&user.name"),
        &["`&std::string::String`", problem],
        &by("Key::new(&user.name)"),
    );
    fixes(
        &by("{ let _ = &user.id; Id }"),
        &[
            problem,
            "the bytes that identify it, such as `Key::new(user.id.to_string())`",
        ],
        &by("{ let _ = &user.id; 7 }"),
    );
}

#[test]
fn a_service_must_be_clone() {
    let of = |derived: &str| {
        format!(
            "{derived}
             struct Shop;
             tower_layer::Layer::layer(&RateLimitLayer::new(LocalStore::default(), Global, policy), Shop);"
        )
    };
    fixes(
        &of(""),
        &[
            "`Shop` is not `Clone`, and a limited service is cloned for each request",
            "derive `Clone` for the service",
            "`tower::buffer::Buffer::new(service, 1_024)`",
        ],
        &of("#[derive(Clone)]"),
    );
}

#[test]
fn a_share_may_be_a_number() {
    let of = |share: &str| {
        format!(
            "Fallback::builder(LocalStore::default(), LocalStore::default()).share({share}).build();"
        )
    };
    fixes(
        &of("\"4\""),
        &["the trait bound `Instances: From<&str>` is not satisfied"],
        &of("4"),
    );
}

#[test]
fn a_wrong_cost_names_the_conversion_and_the_place_for_async() {
    let with =
        |cost: &str| format!("RateLimitLayer::new(LocalStore::default(), Global, policy){cost};");
    let right = with(
        ".cost(|request| u32::try_from(request.uri.path().len() as u64).unwrap_or(u32::MAX))
         .cost(|request| request.uri.path().parse().unwrap_or(1))
         .cost(|request| match request.uri.path() { \"/search\" => 5, _ => 1 })
         .cost_under(|_, policies| policies[0].quota().limit() / 10)",
    );
    for (wrong, found) in [
        (".cost(async |_| 1)", "async closure body"),
        (".cost(|_| async { 1 })", "async block"),
        (".cost_under(|_, _| async { 1 })", "async block"),
        (".cost(|request| request.uri.path().len() as u64)", "`u64`"),
    ] {
        fixes(
            &with(wrong),
            &[
                found,
                "is not the cost of a request",
                "the closure must return a `u32`",
                "another integer: `u32::try_from(cost).unwrap_or(u32::MAX)`",
                "a cost that must be awaited: `.cost(|_| 0)`, and `RequestCost::reserve` in the handler",
            ],
            &right,
        );
    }
}

#[test]
fn a_limiter_selects_policies_by_key() {
    fixes(
        "Limiter::new(LocalStore::default(), Routes::new(policy));",
        &[
            "Routes` gives no policies for a request",
            "a `Limiter`, which has no request: `Tiers`, or a closure of the key, as in `|key: &Key| ..`",
        ],
        "let store = LocalStore::default();
         Limiter::new(store.clone(), |_: &Key| None);
         Limiter::new(store.clone(), Live::new(Tiers::new(policy.clone())));
         Limiter::new(store, Policies::new([policy])?);",
    );
    fixes(
        "Limiter::new(LocalStore::default(), Policy::new(\"api\", Strategy::Gcra, Quota::per_second(50)));",
        &["add `?`, as in `Policy::new(name, strategy, quota)?`"],
        "Limiter::new(LocalStore::default(), policy);",
    );
}

/// The names are those of the guide, without the types behind them.
#[test]
fn wrong_layer_types_are_named_plainly() {
    let layer = "RateLimitLayer::new(LocalStore::default(), Global, policy)";
    let field = |of: &str, layer: &str| {
        format!(
            "use rate_limit::SettledLayer;
             struct Limits {{ api: {of} }}
             let _ = Limits {{ api: {layer} }};"
        )
    };
    fixes(
        &field("RateLimitLayer<LocalStore, PeerIp>", layer),
        &["expected `PeerIp`, found `Global`"],
        &field("RateLimitLayer<LocalStore, Global>", layer),
    );
    let fixed = format!("{layer}.reject(HttpReject::new().json(\"{{}}\"))");
    fixes(
        &field("SettledLayer<LocalStore, Global>", &fixed),
        &[
            "expected `SettledLayer<LocalStore, Global>`",
            "found `RateLimitLayer<LocalStore, Global>`",
        ],
        &field("RateLimitLayer<LocalStore, Global>", &fixed),
    );
    let calls = "CallLimitLayer::new(LocalStore::default(), Global, policy)
                     .settle(|_: &Result<bool, _>| Settlement::Keep)";
    let settled = "Result<bool, Box<dyn std::error::Error + Send + Sync>>";
    fixes(
        &field("CallLimitLayer<LocalStore, Global, u32>", calls),
        &[
            "expected `CallLimitLayer<LocalStore, Global, u32>`",
            "found struct `tower_redis_ratelimit::CallLimitLayer<_, _, _, Result<bool, ",
        ],
        &field(
            &format!("CallLimitLayer<LocalStore, Global, u32, {settled}>"),
            calls,
        ),
    );
}

#[test]
fn a_rule_reads_the_responses_of_its_service() {
    let settled_by = |response: &str| {
        format!(
            "use std::{{convert::Infallible, future::Ready, task::{{Context, Poll}}}};
             #[derive(Clone)]
             struct Double;
             impl tower_service::Service<u32> for Double {{
                 type Response = u32;
                 type Error = Infallible;
                 type Future = Ready<Result<u32, Infallible>>;
                 fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {{
                     Poll::Ready(Ok(()))
                 }}
                 fn call(&mut self, number: u32) -> Self::Future {{
                     std::future::ready(Ok(2 * number))
                 }}
             }}
             let layer = CallLimitLayer::new(LocalStore::default(), Global, policy)
                 .settle(|_: &Result<{response}, _>| Settlement::Keep);
             let mut service = tower_layer::Layer::layer(&layer, Double);
             let _ = tower_service::Service::call(&mut service, 1);"
        )
    };
    fixes(
        &settled_by("bool"),
        &["type mismatch resolving `<Double as Service<u32>>::Response == bool`"],
        &settled_by("u32"),
    );
}

/// The compiler reports these errors without a text of this crate. The pitfalls of the guide quote them.
#[test]
fn the_guide_quotes_errors_without_a_text() {
    const PAGE: &str = include_str!("../../../docs/pitfalls.md");
    let limits = "RateLimitLayer<LocalStore, Global";
    let layer = "RateLimitLayer::new(LocalStore::default(), Global, policy)";
    let closure = "|rejection| HttpReject::new().reject(rejection)";
    for (quoted, wrong, right) in [
        (
            "Store` is not dyn compatible",
            "fn limits(_: std::sync::Arc<dyn Store>) {}".to_owned(),
            "fn limits(_: AnyStore) {}".to_owned(),
        ),
        (
            "found `SettledLayer<LocalStore, Global>`",
            format!("let _: {limits}> = {layer}.until_body_end();"),
            format!(
                "let _: rate_limit::SettledLayer<LocalStore, Global> = {layer}.until_body_end();"
            ),
        ),
        (
            "expected `HttpReject`, found closure",
            format!("let _: {limits}> = {layer}.reject_with({closure});"),
            format!(
                "let _: {limits}, fn(Rejection<'_>) -> http::Response<String>> = {layer}.reject_with({closure});"
            ),
        ),
    ] {
        fixes(&wrong, &[quoted], &right);
        assert!(PAGE.contains(quoted), "the page lacks {quoted}");
    }
}
