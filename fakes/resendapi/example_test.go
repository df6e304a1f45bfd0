package resendapi_test

import (
	"fmt"
	"net/http"
	"strings"

	"mailproof/fakes/resendapi"
)

// The work is done and the answer is lost. A client that tries again with the
// same key gets the answer that it missed, and there is one mail.
func Example() {
	srv, err := resendapi.Start(resendapi.Options{Rules: []resendapi.Rule{
		resendapi.On(resendapi.StageStored, resendapi.Drop).First(1).Rule(),
	}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer srv.Close()

	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	send := func() string {
		req, err := http.NewRequest("POST", srv.URL+"/emails",
			strings.NewReader(`{"from":"shop@shop.test","to":"ann@x.test","subject":"Your ticket","text":"Hello"}`))
		if err != nil {
			return err.Error()
		}
		req.Header.Set("Authorization", "Bearer re_1")
		req.Header.Set("Idempotency-Key", "ticket:42")
		resp, err := client.Do(req)
		if err != nil {
			return "no answer"
		}
		defer resp.Body.Close()
		return resp.Status
	}
	fmt.Println(send())
	fmt.Println(send())
	v := srv.Verdict("ticket:42")
	fmt.Println(v.Verdict, "after", v.Attempts, "requests")
	// Output:
	// no answer
	// 200 OK
	// once after 2 requests
}

// In a test one line is enough: the server closes when the test ends.
func ExampleNewServer() {
	var t resendapi.TB // *testing.T
	if t == nil {
		return
	}
	srv := resendapi.NewServer(t, resendapi.On(resendapi.StageRequest, resendapi.Reply).Code(429).First(3))
	fmt.Println(srv.URL)
}
