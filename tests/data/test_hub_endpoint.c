/* test_hub_endpoint.c - HF_ENDPOINT: malformed addresses, proxies. */
#include <stdlib.h>
#include <string.h>

#include "data/hub/hub_cache.h"
#include "tests/hub_server.h"
#include "tests/process.h"

/* Every malformed endpoint is an error before anything is sent, with a token and without one; a password is not
 * printed. */
static void test_endpoints(void **state)
{
    (void)state;
    static const struct {
        const char *endpoint, *says;
    } bad[] = {{"ftp://x", "neither https:// nor http://"},
               {"huggingface.co", "neither https:// nor http://"},
               {"https:/", "neither"},
               {"https://", "no valid name of a machine"},
               {"http://", "no valid name of a machine"},
               {"http:////", "no valid name of a machine"},
               {"https:///path", "no valid name of a machine"},
               {"https://:8080", "no valid name of a machine"},
               {"https://[::1", "no valid name of a machine"},
               {"https://[]", "no valid name of a machine"},
               {"https://[::1]x", "no valid name of a machine"},
               {"https://hub.example:", "its port"},
               {"https://hub.example:0", "its port"},
               {"https://hub.example:65536", "its port"},
               {"https://hub.example:4294967376", "its port"},
               {"https://hub.example:80x/y", "its port"},
               {"https://hub.example?x", "a character"},
               {"https://hub.example/#x", "a character"},
               {"https://hub.example\\x", "a character"},
               {"https://hub.example /", "a character"},
               {"https://hub.example\n", "a character"}};
    static const char *const good[] = {"https://hub.example", "https://hub.example:8443/", "http://hub.example/a/b///",
                                       "https://[2001:db8::1]:443", "http://10.0.0.1"};
    struct hub_env env;
    struct err err;
    for (int token = 0; token < 2; token++) {
        if (token) setenv("HF_TOKEN", "hf_good", 1);
        for (int i = 0; i < MT_LEN(bad); i++) {
            setenv("HF_ENDPOINT", bad[i].endpoint, 1);
            assert_refused("plain", "main", "HF_ENDPOINT", bad[i].says);
        }
        setenv("HF_ENDPOINT", "https://me:secret@hub.example", 1);
        assert_refused("plain", "main", "HF_ENDPOINT", "user name or password");
        assert_int_equal(hub_env_read(&env, &err), -1);
        assert_null(strstr(err.msg, "secret"));
    }
    unsetenv("HF_TOKEN");
    for (int i = 0; i < MT_LEN(good); i++) {
        setenv("HF_ENDPOINT", good[i], 1);
        if (hub_env_read(&env, &err)) fail_msg("%s", err.msg);
        assert_int_not_equal(env.endpoint[strlen(env.endpoint) - 1], '/');
    }
}

/* A request to this machine uses no proxy, which would get the token unencrypted. */
static void test_proxy(void **state)
{
    (void)state;
    static const char *const names[] = {"http_proxy", "all_proxy"};
    for (int i = 0; i < MT_LEN(names); i++) {
        hub_fresh(NULL);
        setenv("HF_TOKEN", "hf_good", 1);
        setenv(names[i], "http://127.0.0.1:9", 1);
        assert_downloads("private");
        assert_true(hub_requests("hub", "hf_good") > 0);
    }
}

int test_hub_endpoint(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_endpoints, hub_fresh),
        cmocka_unit_test_setup(test_proxy, hub_fresh),
    };
    if (!hub_can_run()) return 0;
    const int failed = cmocka_run_group_tests_name("hub_endpoint", tests, NULL, NULL);
    hub_stop();
    return failed;
}
