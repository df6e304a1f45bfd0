package target_test

import (
	"cmp"
	"fmt"
	"os"
	"testing"
	"time"

	"mailproof/fakes/smtp"
	"mailproof/history"
	"mailproof/target"
)

// BenchmarkMarketing sends one campaign of b.N mails from end to end:
//
//	go test -run - -bench Marketing -benchtime 10000x ./target
//
// MARKETING_PARALLEL is the variable of the same name.
func BenchmarkMarketing(b *testing.B) {
	if err := shared.start(); err != nil {
		b.Fatal(err)
	}
	server, err := smtp.Start(smtp.Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = server.Close() }() // what it kept is not looked at
	p, err := target.StartPipeline(b.Context(), target.PipelineConfig{
		Stack: shared.stack, Name: fmt.Sprintf("bench%d", b.N), SMTPAddr: server.Addr(), LogDir: b.TempDir(), Binaries: shared.binaries,
		RetryDelays: []time.Duration{time.Second}, MaxAttempts: 2,
		Env: map[string]string{"NOTIFYD_MARKETING_RATE": "0", "NOTIFYD_MARKETING_PARALLEL": cmp.Or(os.Getenv("MARKETING_PARALLEL"), "0")},
	})
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := p.Stop(b.Context()); err != nil {
			b.Error(err)
		}
	}()
	to := recipients(b.N)
	mark := p.Mark()
	b.ResetTimer()
	if _, outcome := p.Campaign(b.Context(), "bench", to); outcome != history.OpOK {
		b.Fatalf("the campaign was not taken in: %s", outcome)
	}
	accepted := b.Elapsed()
	for done := int64(0); done < int64(b.N); {
		time.Sleep(250 * time.Millisecond)
		c, err := p.CampaignState(b.Context(), "bench")
		if err != nil {
			b.Fatal(err)
		}
		done = c.Counts["sent"]
	}
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "mails/s")
	b.ReportMetric(float64(b.N)/accepted.Seconds(), "accepted/s")
	for name, u := range p.Since(mark) {
		b.ReportMetric(u.CPUSeconds*1000/float64(b.N), "ms-"+name+"/mail")
	}
}
