package resendapi

// TB is the part of *testing.T that [NewServer] needs.
type TB interface {
	Helper()
	Cleanup(func())
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

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
	if err != nil {
		t.Fatalf("starting the fake: %v", err)
		return nil
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("closing the fake: %v", err)
		}
	})
	return s
}
