"""Redis URLs: three topologies, TLS, credentials that never show, and what is refused."""

import pytest

from metadata.errors import InvalidInput
from metadata.redis_url import RedisAddress, parse_redis_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", RedisAddress("single", (("h", 6379),))),
        ("redis://h:1/3", RedisAddress("single", (("h", 1),), db=3)),
        ("redis://h:1?db=4", RedisAddress("single", (("h", 1),), db=4)),
        ("redis://:p%40ss@h", RedisAddress("single", (("h", 6379),), password="p@ss")),
        ("redis://u:p@h", RedisAddress("single", (("h", 6379),), username="u", password="p")),
        (
            "redis://h?username=u&password=p",
            RedisAddress("single", (("h", 6379),), username="u", password="p"),
        ),
        ("redis://[::1]:7", RedisAddress("single", (("::1", 7),))),
        ("rediss://h", RedisAddress("single", (("h", 6379),), tls=True)),
        (
            "rediss://h?ssl_ca_certs=/ca.pem",
            RedisAddress("single", (("h", 6379),), tls=True, tls_files=(("ssl_ca_certs", "/ca.pem"),)),
        ),
        ("unix:///run/redis.sock?db=2", RedisAddress("single", (), path="/run/redis.sock", db=2)),
        ("redis+cluster://a:1,b:2", RedisAddress("cluster", (("a", 1), ("b", 2)))),
        ("redis+cluster://a,[::1]:2", RedisAddress("cluster", (("a", 6379), ("::1", 2)))),
        ("rediss+cluster://a/0", RedisAddress("cluster", (("a", 6379),), tls=True)),
        ("redis+sentinel://a,b:2/svc", RedisAddress("sentinel", (("a", 26379), ("b", 2)), service="svc")),
        (
            "rediss+sentinel://u:p@a/svc/5?sentinel_username=s&sentinel_password=t",
            RedisAddress(
                "sentinel",
                (("a", 26379),),
                tls=True,
                db=5,
                service="svc",
                username="u",
                password="p",
                sentinel_username="s",
                sentinel_password="t",
            ),
        ),
    ],
)
def test_a_url_names_what_is_behind_it(url, expected):
    assert parse_redis_url(url) == expected


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://h", "scheme 'http'"),
        ("redis://[::1", "IPv6"),
        ("redis://", "host:port"),
        ("redis://h:0", "host:port"),
        ("redis://h:70000", "host:port"),
        ("redis://h:x", "host:port"),
        ("redis://a,b", "redis+cluster://"),
        ("redis://h/x", "not a number"),
        ("redis://h/²", "not a number"),
        ("redis://h/1/2", "longer"),
        ("redis://h?timeout=3", "unknown parameters: timeout"),
        ("redis+cluster://a/3", "database 0 only"),
        ("redis+sentinel://a", "names no service"),
        ("redis+sentinel://a/", "names no service"),
        ("redis+sentinel://a/svc/1/2", "longer"),
    ],
)
def test_a_url_that_cannot_be_used_says_why(url, says):
    with pytest.raises(InvalidInput) as caught:
        parse_redis_url(url)
    (error,) = caught.value.errors
    assert error.field == "redis_url"
    assert says in error.detail


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:hunter2@h:70000",
        "ftp://u:hunter2@h",
        "redis://u:hunter2@h?x=hunter2",
        "redis+sentinel://u:hunter2@h",
    ],
)
def test_an_error_never_shows_the_password(url):
    with pytest.raises(InvalidInput) as caught:
        parse_redis_url(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://u:hunter2@h:1/3", "redis://h:1/3"),
        ("rediss+cluster://u:hunter2@a:1,[::1]:2", "rediss+cluster://a:1,[::1]:2"),
        ("redis+sentinel://u:hunter2@a:1/svc/2?sentinel_password=hunter2", "redis+sentinel://a:1/svc/2"),
        ("unix:///run/r.sock?password=hunter2", "unix:///run/r.sock"),
    ],
)
def test_an_address_shows_no_password_as_text_or_in_a_repr(url, text):
    address = parse_redis_url(url)
    assert str(address) == text
    assert "hunter2" not in repr(address)
