-- release_key: free an idempotency key whose job was refused for good, unless it stands for another job by now.
-- KEY key hash
-- ARG job str the refused id
-- FLAGS allow-oom
-- RETURN {"ok"} | {"other"}
if redis.call('HGET', key, 'job') ~= job then return {'other'} end
redis.call('DEL', key)
return {'ok'}
