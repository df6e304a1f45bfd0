package resendapi

import "mailproof/fakes/base"

// TB is the part of *testing.T that [NewServer] needs.
type TB = base.TB

// NewServer starts a server for one test and closes it when the test ends:
//
//	srv := resendapi.NewServer(t, resendapi.On(resendapi.StageStored, resendapi.Drop).First(1))
//
// It accepts any API key on a free loopback port; [Start] has more to choose
// from.
func NewServer(t TB, rules ...Builder) *Server {
	t.Helper()
	opt := Options{Seed: 1}
	for _, b := range rules {
		opt.Rules = append(opt.Rules, b.Rule())
	}
	s, err := Start(opt)
	return base.ForTest(t, s, err)
}
