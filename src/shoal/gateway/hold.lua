-- Holds a request while its service has no replica, and releases it as soon as there is one.
-- It polls, which is cheap enough because it only happens without replicas.

local PAUSE_FIRST_MS = 10
local PAUSE_MAX_MS = 200

-- A replica that rests because it is slow or faulty is better than none. Draining replicas keep
-- their weight and are left alone.
local function call_back(backend)
  for _, server in pairs(core.backends[backend].servers) do
    if tonumber(server:get_weight()) == 0 then
      server:set_weight("1")
    end
  end
end

local function refuse(txn, problem)
  txn:done({
    status = 503,
    headers = { ["content-type"] = { "application/json" }, ["retry-after"] = { "1" } },
    body = '{"error":"' .. problem .. '"}',
  })
end

local function hold(txn, backend, most, limit_ms)
  local limit, waited, pause = tonumber(limit_ms), 0, PAUSE_FIRST_MS
  call_back(backend)
  if txn.f:be_conn(backend) > tonumber(most) then
    refuse(txn, "the queue is full")
  end
  while txn.f:nbsrv(backend) == 0 do
    if waited >= limit then
      refuse(txn, "no replica became ready in time")
    end
    core.msleep(pause)
    waited = waited + pause
    pause = math.min(pause * 2, PAUSE_MAX_MS, math.max(limit - waited, 1))
  end
end

core.register_action("hold", { "http-req" }, hold, 3)
