package smtp_test

import (
	"context"
	"fmt"
	netsmtp "net/smtp"
	"time"

	"mailproof/fakes/smtp"
)

// A sender that takes an error for "not sent" and tries again sends twice: the
// server had stored the mail before it lost the answer.
func Example() {
	srv, err := smtp.Start(smtp.Options{Rules: []smtp.Rule{
		smtp.On(smtp.StageStored, smtp.Drop).First(1).Rule(),
	}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer srv.Close()

	mail := []byte("X-Dedupe-Key: ticket:42\r\nSubject: Your ticket\r\n\r\nHello.\r\n")
	send := func() error {
		return netsmtp.SendMail(srv.Addr(), nil, "shop@example.com", []string{"ann@example.com"}, mail)
	}
	fmt.Println("first try:", send())
	fmt.Println("second try:", send())
	v := srv.Verdict("ticket:42")
	fmt.Println(v.Verdict, v.Copies)
	// Output:
	// first try: EOF
	// second try: <nil>
	// doubled 2
}

// Hold a mail after its final dot was read, do something to the sender, let
// the server go on.
func ExampleServer_AwaitHold() {
	srv, err := smtp.Start(smtp.Options{Rules: []smtp.Rule{
		smtp.On(smtp.StageDot, smtp.HoldUntilReleased).Key("ticket:42").Rule(),
	}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer srv.Close()

	sent := make(chan error)
	go func() {
		sent <- netsmtp.SendMail(srv.Addr(), nil, "shop@example.com", []string{"ann@example.com"},
			[]byte("X-Dedupe-Key: ticket:42\r\n\r\nHello.\r\n"))
	}()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	h, err := srv.AwaitHold(ctx, nil)
	fmt.Println(h.Stage, h.Key, err)
	fmt.Println("copies while held:", srv.Verdict("ticket:42").Copies)
	srv.Release(h.ID) // a test would kill the sender first
	fmt.Println(<-sent)
	fmt.Println("copies after:", srv.Verdict("ticket:42").Copies)
	// Output:
	// dot ticket:42 <nil>
	// copies while held: 0
	// <nil>
	// copies after: 1
}

// In a test one line is enough: smtp.New(t, rules...) closes the server when
// the test ends.
func ExampleNew() {
	var t smtp.TB // *testing.T
	if t == nil {
		return
	}
	srv := smtp.New(t, smtp.On(smtp.StageRcpt, smtp.Reply).Code(451).To("bob@*").First(3))
	fmt.Println(srv.Addr())
}
