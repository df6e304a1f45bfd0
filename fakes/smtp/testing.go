package smtp

import "mailproof/fakes/base"

// TB is the part of *testing.T that [New] needs.
type TB = base.TB

// New starts a server for one test and closes it when the test ends:
//
//	srv := smtp.New(t, smtp.On(smtp.StageStored, smtp.Drop).First(1))
//
// It is plain, on a free loopback port, without a control API; [Start] has
// more to choose from.
func New(t TB, rules ...Builder) *Server {
	t.Helper()
	opt := Options{Seed: 1}
	for _, b := range rules {
		opt.Rules = append(opt.Rules, b.Rule())
	}
	s, err := Start(opt)
	return base.ForTest(t, s, err)
}
