-- Holds a request while its service has no replica, and lets it go as soon as there is one.
-- The wait is polled: it happens only while there is nothing to be served from.

local PAUSE_FIRST_MS = 10
local PAUSE_MAX_MS = 200

-- Replicas that were set aside for being slow or faulty are better than none. Those that are
-- draining keep their weight and are left alone.
local function call_back(backend)
  for _, server in pairs(core.backends[backend].servers) do
    if tonumber(server:get_weight()) == 0 then
      server:set_weight("1")
    end
  end
end

local function hold(txn, backend, most, limit_ms)
  local limit, waited, pause = tonumber(limit_ms), 0, PAUSE_FIRST_MS
  call_back(backend)
  if txn.f:be_conn(backend) > tonumber(most) then
    txn:set_var("txn.held", "full")
    return
  end
  while txn.f:nbsrv(backend) == 0 do
    if waited >= limit then
      txn:set_var("txn.held", "in vain")
      return
    end
    core.msleep(pause)
    waited = waited + pause
    pause = math.min(pause * 2, PAUSE_MAX_MS, math.max(limit - waited, 1))
  end
end

core.register_action("hold", { "http-req" }, hold, 3)
