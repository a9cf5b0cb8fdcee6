// Libraries that are loaded as UCX and are not one that works: PEGA_FAKE_MINOR is the version 1.X
// that they report. They have none of the functions that a fabric calls.
extern "C" {
__attribute__((visibility("default"))) void ucp_get_version(unsigned* major, unsigned* minor,
                                                            unsigned* release);
__attribute__((visibility("default"))) const char* ucp_get_version_string();

void ucp_get_version(unsigned* major, unsigned* minor, unsigned* release) {
  *major = 1;
  *minor = PEGA_FAKE_MINOR;
  *release = 7;
}

const char* ucp_get_version_string() { return "the fake"; }
}
