package infra

import "errors"

// ErrUnsupported is returned for an act that a provider cannot perform on a
// part, such as killing a server that the user only gave an address of. A fault
// that meets it is skipped, and says so.
var ErrUnsupported = errors.New("not supported by this provider")
