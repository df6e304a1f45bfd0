// The official SDK is only needed to test against it: a module of its own
// keeps it out of mailproof's dependencies.
module mailproof/fakes/resendapi/sdks/go

go 1.26.0

require github.com/resend/resend-go/v3 v3.16.0
